//! The process group whose device tensors go over NCCL, and the ways to share the unique id.

use std::sync::Arc;

use epoxide::driver::Stream;
use epoxide::group::run_threads;
use epoxide::group::{Collectives, HashStore, ProcessGroup, ReduceOp, Store};
use epoxide::{DType, Tensor};
use epoxide_nccl::{Communicator, Config, NcclGroup};

use super::fake::{Fake, PATIENCE, Version, device, patient};

fn sum(communicator: &Communicator) -> i32 {
    let stream = Stream::new(communicator.device()).unwrap();
    let tensor = Tensor::from_host(&stream, DType::I32, &[1], &[communicator.rank() as i32 + 1]).unwrap();
    communicator.all_reduce(&tensor, ReduceOp::Sum, &stream).unwrap().wait().unwrap();
    tensor.to_host::<i32>(&stream).unwrap()[0]
}

#[test]
fn host_data_and_device_tensors_have_a_way_each_and_parts_too() {
    // NCCL before 2.18 cannot split, and the parts are made anew.
    for version in [Version::New, Version::Old] {
        let fake = Fake::of(version);
        run_threads(4, PATIENCE, |rank, host| {
            let group = NcclGroup::new(host, &fake.library, &device(), patient())?;
            assert_eq!(group.backend(), "host:mesh,device:nccl");
            assert_eq!(group.all_gather_slices(&[rank])?.concat(), [0, 1, 2, 3]);
            assert_eq!(sum(group.device()), 10);
            // As u64, colors are more than NCCL has.
            let part = group.split_group(u64::MAX - u64::from(rank % 2))?;
            assert_eq!((part.rank(), part.size(), part.device().rank()), (rank / 2, 2, rank / 2));
            assert_eq!(part.all_gather_slices(&[rank])?.concat(), [rank % 2, rank % 2 + 2]);
            assert_eq!(sum(part.device()), 3);
            part.destroy()?;
            assert!(part.device().check().is_err());
            group.destroy()
        })
        .unwrap();
        fake.assert_clean();
    }
}

#[test]
fn abort_gives_both_ways_up() {
    let fake = Fake::new();
    run_threads(2, PATIENCE, |rank, host| {
        let group = NcclGroup::new(host, &fake.library, &device(), patient())?;
        if rank == 1 {
            group.barrier(PATIENCE)?;
        } else {
            group.barrier(PATIENCE)?;
            ProcessGroup::abort(&group, "that is all");
            let error = group.device().check().unwrap_err().to_string();
            assert!(error.contains("that is all"), "{error}");
            assert!(group.barrier(PATIENCE).unwrap_err().to_string().contains("that is all"));
        }
        Ok(())
    })
    .unwrap();
    fake.assert_clean();
}

#[test]
fn the_unique_id_goes_over_a_store() {
    let fake = Fake::new();
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (store, fake) = (store.clone(), &fake);
            scope.spawn(move || {
                let make = |name: &str| {
                    let config = Config { name: name.into(), ..patient() };
                    Communicator::over_store(&fake.library, &device(), &*store, rank, 3, config).unwrap()
                };
                let (one, other) = (make("one"), make("other"));
                assert_eq!((sum(&one), sum(&other)), (6, 6));
                one.finalize().unwrap();
                other.finalize().unwrap();
            });
        }
    });
    fake.assert_clean();
}

#[test]
fn a_unique_id_that_rank_0_cannot_make_is_an_error_on_all_ranks() {
    let fake = Fake::new();
    fake.set("ncclGetUniqueId", 2);
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    run_threads(2, PATIENCE, |rank, host| {
        for made in [
            Communicator::over_group(&fake.library, &device(), &*host, patient()),
            Communicator::over_store(&fake.library, &device(), &*store, rank, 2, patient()),
        ] {
            let error = made.unwrap_err().to_string();
            assert!(error.contains("ncclGetUniqueId"), "{error}");
        }
        Ok(())
    })
    .unwrap();
}
