//! The number of this rank, from the variables of its launcher.

use crate::env::{self, LOCAL_RANK, LOCAL_WORLD_SIZE, Lookup, RANK, WORLD_SIZE};
use crate::error::{Error, Result};

/// The launcher of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// `epoxide launch`, or a script: `RANK` and `WORLD_SIZE`. An address with rank and size counts
    /// as this, too.
    Plain,
    /// torchrun: the same, and `TORCHELASTIC_RUN_ID`.
    Torchrun,
    /// Open MPI: `OMPI_COMM_WORLD_RANK` and `OMPI_COMM_WORLD_SIZE`.
    OpenMpi,
    /// MPICH, Intel MPI and others with PMI: `PMI_RANK` and `PMI_SIZE`.
    Pmi,
    /// Slurm's srun: `SLURM_PROCID`, and `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`.
    Slurm,
    /// Another launcher with PMIx: `PMIX_RANK`, and `WORLD_SIZE`, as PMIx has no variable for it.
    Pmix,
}

/// A rank's number, its neighbours and its launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its number, below `size`.
    pub rank: u32,
    /// The number of ranks.
    pub size: u32,
    /// Its number among the ranks of its host, if that is known. With one GPU for each rank this is
    /// the ordinal of the rank's GPU among the visible ones.
    pub local_rank: Option<u32>,
    /// How many ranks its host has, if that is known.
    pub local_size: Option<u32>,
    /// Its launcher.
    pub(crate) launcher: Launcher,
    /// The name of the variable that `size` came from.
    pub(super) size_name: &'static str,
}

/// The names of a launcher's variables.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    size: &'static [&'static str],
    local_rank: &'static str,
    local_size: &'static str,
}

const PLAIN: Names = Names {
    launcher: Launcher::Plain,
    rank: RANK,
    size: &[WORLD_SIZE],
    local_rank: LOCAL_RANK,
    local_size: LOCAL_WORLD_SIZE,
};
const OPEN_MPI: Names = Names {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    size: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
};
const PMI: Names = Names {
    launcher: Launcher::Pmi,
    rank: "PMI_RANK",
    size: &["PMI_SIZE"],
    local_rank: "MPI_LOCALRANKID",
    local_size: "MPI_LOCALNRANKS",
};
const SLURM: Names = Names {
    launcher: Launcher::Slurm,
    rank: "SLURM_PROCID",
    size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: "SLURM_LOCALID",
    // Its variable of that kind is a list.
    local_size: "",
};
const PMIX: Names = Names {
    launcher: Launcher::Pmix,
    rank: "PMIX_RANK",
    size: &[WORLD_SIZE],
    local_rank: LOCAL_RANK,
    local_size: LOCAL_WORLD_SIZE,
};

impl Member {
    /// Returns this process's place among the ranks of a job, from its environment; `None` if
    /// nothing there makes it a rank.
    ///
    /// `RANK` takes precedence: a torchrun on each of several hosts may itself have been started by
    /// mpirun or srun. Then Open MPI, PMI, Slurm and PMIx are tried. Slurm's variables count only
    /// in a step that srun started: a job's script has them, too, and is not a rank.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) where a variable is malformed or one is missing
    /// beside others.
    pub fn detect() -> Result<Option<Member>> {
        Member::from_variables(&env::environment)
    }

    /// Like [`Member::detect`] in an environment of the caller's.
    pub(crate) fn from_variables(variable: Lookup<'_>) -> Result<Option<Member>> {
        let set = |name: &str| variable(name).is_some_and(|value| !value.is_empty());
        let in_step = set("SLURM_STEP_ID") || set("SLURM_STEPID");
        let names = if set(RANK) {
            &PLAIN
        } else if set(OPEN_MPI.rank) {
            agree(variable, OPEN_MPI.rank, PMIX.rank)?;
            agree(variable, OPEN_MPI.size[0], WORLD_SIZE)?;
            &OPEN_MPI
        } else if set(PMI.rank) {
            agree(variable, PMI.size[0], WORLD_SIZE)?;
            &PMI
        } else if in_step && set(SLURM.rank) {
            &SLURM
        } else if set(PMIX.rank) {
            &PMIX
        } else {
            return Ok(None);
        };
        let member = Member::from_names(names, variable)?;
        let torchrun = names.launcher == Launcher::Plain && set("TORCHELASTIC_RUN_ID");
        let launcher = if torchrun { Launcher::Torchrun } else { names.launcher };
        Ok(Some(Member { launcher, ..member }))
    }

    /// Like [`Member::from_variables`], for a process that must be a rank.
    pub(super) fn required(variable: Lookup<'_>) -> Result<Member> {
        Member::from_variables(variable)?.ok_or_else(|| {
            let name = if variable(WORLD_SIZE).is_some() { RANK } else { WORLD_SIZE };
            Error::argument(
                name,
                "unset",
                "nothing in the environment says which rank this process is; start it with `epoxide launch`, torchrun, \
                 mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            )
        })
    }

    fn from_names(names: &Names, variable: Lookup<'_>) -> Result<Member> {
        let size_name = names.size.iter().copied().find(|name| variable(name).is_some());
        let Some(size_name) = size_name else {
            let rule = format!("the environment has {}, and must have the number of ranks here", names.rank);
            return Err(Error::argument(names.size[0], "unset", rule));
        };
        let required = |name| {
            number(variable, name)?.ok_or_else(|| Error::argument(name, "unset", "must be a whole number"))
        };
        let member = Member::new(required(names.rank)?, required(size_name)?, names.rank, size_name)?;
        let local_rank = number(variable, names.local_rank)?;
        let local_size = number(variable, names.local_size)?;
        let below = [
            (local_rank, names.local_rank, local_size, names.local_size),
            (local_rank, names.local_rank, Some(member.size), size_name),
            (local_size, names.local_size, member.size.checked_add(1), size_name),
        ];
        for (value, name, limit, limit_name) in below {
            if let (Some(value), Some(limit)) = (value, limit)
                && value >= limit
            {
                let relation = if name == names.local_size { "at most" } else { "below" };
                let have = variable(limit_name).unwrap_or_default();
                let rule = format!("contradicts {limit_name}: must be {relation} it, and it is {have}");
                return Err(Error::argument(name, value, rule));
            }
        }
        Ok(Member { local_rank, local_size, launcher: names.launcher, ..member })
    }

    pub(super) fn new(
        rank: u32,
        size: u32,
        rank_name: &'static str,
        size_name: &'static str,
    ) -> Result<Member> {
        if size == 0 {
            return Err(Error::argument(size_name, size, "a group has at least one rank"));
        }
        if size > env::MAX_RANKS {
            return Err(Error::argument(size_name, size, env::too_many_ranks()));
        }
        if rank >= size {
            return Err(Error::argument(
                rank_name,
                rank,
                format!("must be below {size_name}, which is {size}"),
            ));
        }
        Ok(Member { rank, size, local_rank: None, local_size: None, launcher: Launcher::Plain, size_name })
    }
}

fn number(variable: Lookup<'_>, name: &'static str) -> Result<Option<u32>> {
    variable(name)
        .map(|text| text.parse().map_err(|_| Error::argument(name, text, "must be a whole number")))
        .transpose()
}

/// Rejects variables that are both set, and differ.
fn agree(variable: Lookup<'_>, ours: &'static str, other: &'static str) -> Result<()> {
    match (variable(ours), variable(other)) {
        (Some(value), Some(differs)) if value != differs => {
            let rule = format!("contradicts {other}, which is {differs}; unset the one that is not meant");
            Err(Error::argument(ours, value, rule))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(variables: &str) -> Result<Option<Member>> {
        let lookup = |name: &str| {
            let mut pairs = variables.split_whitespace().filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
        };
        Member::from_variables(&lookup)
    }

    #[test]
    fn launchers() {
        let ompi = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 PMIX_RANK=3";
        let slurm = "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1";
        let cases = [
            ("RANK=1 WORLD_SIZE=2".to_owned(), Launcher::Plain, 1, 2, None),
            (
                "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 TORCHELASTIC_RUN_ID=x".to_owned(),
                Launcher::Torchrun,
                1,
                2,
                Some(0),
            ),
            (ompi.to_owned(), Launcher::OpenMpi, 3, 4, Some(1)),
            (format!("RANK=7 WORLD_SIZE=9 {ompi} {slurm}"), Launcher::Plain, 7, 9, None),
            ("PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0".to_owned(), Launcher::Pmi, 0, 1, Some(0)),
            (format!("SLURM_STEP_ID=0 {slurm}"), Launcher::Slurm, 5, 8, Some(1)),
            (
                format!("SLURM_STEPID=0 SLURM_STEP_NUM_TASKS=6 PMIX_RANK=5 {slurm}"),
                Launcher::Slurm,
                5,
                6,
                Some(1),
            ),
            ("PMIX_RANK=2 WORLD_SIZE=3".to_owned(), Launcher::Pmix, 2, 3, None),
        ];
        for (variables, launcher, rank, size, local_rank) in cases {
            let member = detect(&variables).unwrap().unwrap();
            assert_eq!(
                (member.launcher, member.rank, member.size, member.local_rank),
                (launcher, rank, size, local_rank),
                "{variables}"
            );
        }
        for nothing in ["", "WORLD_SIZE=3", slurm, "LOCAL_RANK=0"] {
            assert_eq!(detect(nothing).unwrap(), None, "{nothing}");
        }
    }

    #[test]
    fn errors_name_the_variable() {
        let cases = [
            ("RANK=0", WORLD_SIZE),
            ("RANK=0 WORLD_SIZE=two", WORLD_SIZE),
            ("RANK=0 WORLD_SIZE=0", WORLD_SIZE),
            ("RANK=0 WORLD_SIZE=65537", WORLD_SIZE),
            ("RANK=0 WORLD_SIZE=4294967295", WORLD_SIZE),
            ("RANK=2 WORLD_SIZE=2", RANK),
            ("RANK=-1 WORLD_SIZE=2", RANK),
            ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=x", LOCAL_RANK),
            ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1", LOCAL_RANK),
            ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=2", LOCAL_RANK),
            ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3", LOCAL_WORLD_SIZE),
            ("OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE"),
            ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=1", "OMPI_COMM_WORLD_RANK"),
            ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 WORLD_SIZE=3", "OMPI_COMM_WORLD_SIZE"),
            ("PMI_RANK=0", "PMI_SIZE"),
            ("SLURM_PROCID=0 SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS"),
            ("PMIX_RANK=0", WORLD_SIZE),
        ];
        for (variables, name) in cases {
            let error = detect(variables).unwrap_err();
            assert!(
                matches!(&error, Error::Argument { argument, .. } if *argument == name),
                "{variables}: {error}"
            );
        }
    }
}
