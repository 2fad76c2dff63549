//! Finding the library and checking what it has.

use epoxide::Error;
use epoxide_nccl::{Communicator, Config, Library};

use super::fake::{Fake, PATIENCE, Version, device, file, impatient, patient};

#[test]
fn version_and_functions_are_read() {
    let new = Fake::new();
    assert_eq!((new.library.version(), new.library.version_text()), (22803, "2.28.3".to_owned()));
    let lacking: Vec<_> = new.library.lacking().into_iter().map(|(name, _)| name).collect();
    assert_eq!(lacking, ["ncclCommMemStats"]);
    let old = Fake::of(Version::Old);
    assert_eq!((old.library.version(), old.library.version_text()), (2703, "2.7.3".to_owned()));
    assert!(old.library.lacking().contains(&("ncclCommSplit", "2.18")), "{:?}", old.library.lacking());
}

#[test]
fn a_library_that_is_no_nccl_is_rejected_with_the_missing_functions() {
    let (_folder, broken) = file(Version::Broken);
    let error = Library::open(&broken).unwrap_err().to_string();
    assert!(error.contains("ncclSend") && error.contains("libnccl.so.2"), "{error}");
    let error = Library::open("/nowhere/libnccl.so").unwrap_err().to_string();
    assert!(error.contains("/nowhere/libnccl.so") && error.contains("not available"), "{error}");
}

#[test]
fn an_old_version_works_and_rejects_later_features() {
    let fake = Fake::of(Version::Old);
    let communicator = fake.single(patient());
    let refused = communicator.split(Some(0), 0, None).unwrap_err();
    assert!(matches!(refused, Error::Unavailable { .. }), "{refused:?}");
    let refused = refused.to_string();
    assert!(
        refused.contains("ncclCommSplit") && refused.contains("2.18") && refused.contains("2.7.3"),
        "{refused}"
    );
    let config = Config { max_ctas: Some(4), ..patient() };
    let refused =
        Communicator::new(&fake.library, &device(), &fake.id(), 0, 1, config).unwrap_err().to_string();
    assert!(refused.contains("max_ctas") && refused.contains("2.17"), "{refused}");
    // The error does not end the communicator.
    communicator.check().unwrap();
    communicator.finalize().unwrap();
    drop(communicator);
    fake.assert_clean();
}

#[test]
fn creation_in_an_old_version_that_never_ends_is_left_behind() {
    let fake = Fake::of(Version::Old);
    let error = fake.alone(impatient()).unwrap_err().to_string();
    assert!(error.contains("within its timeout"), "{error}");
    // The thread ends once NCCL's call returns, and frees the late communicator.
    fake.release();
    let start = std::time::Instant::now();
    while fake.live() > 0 {
        assert!(start.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

#[test]
fn nccl_itself_gets_no_virtual_gpu() {
    let fake = Fake::of(Version::Foreign);
    match Communicator::new(&fake.library, &device(), &fake.id(), 0, 1, patient()) {
        Err(Error::Argument { argument: "device", rule, .. }) => {
            assert!(rule.contains("CUDA devices"), "{rule}")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn arguments_are_checked() {
    let fake = Fake::new();
    let make =
        |rank, size, config| Communicator::new(&fake.library, &device(), &fake.id(), rank, size, config);
    for (made, name) in [
        (make(2, 2, patient()), "rank"),
        (make(0, 0, patient()), "size"),
        (make(0, 1, Config { min_ctas: Some(0), ..patient() }), "min_ctas"),
        (make(0, 1, Config { min_ctas: Some(4), max_ctas: Some(2), ..patient() }), "min_ctas"),
        (make(0, 1, Config::named("a\0b")), "name"),
    ] {
        match made {
            Err(Error::Argument { argument, .. }) => assert_eq!(argument, name),
            other => panic!("{other:?}"),
        }
    }
    fake.assert_clean();
}
