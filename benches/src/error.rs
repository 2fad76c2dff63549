//! Why a measurement did not come about.

/// `Result` with [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a measurement did not come about.
#[derive(Clone, thiserror::Error)]
pub enum Error {
    /// The request is wrong, or a file has the wrong form.
    #[error("{0}")]
    Usage(String),
    /// This machine, or the library, has no room for the sizes.
    #[error("{0}")]
    DoesNotFit(String),
    /// Something broke, or what was measured contradicts itself.
    #[error("{0}")]
    Failed(String),
    /// An operation failed.
    #[error(transparent)]
    Operation(epoxide::Error),
}

impl std::fmt::Debug for Error {
    /// The text itself, for a `main` that returns it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl From<epoxide::Error> for Error {
    /// Devices that are too small are no failure.
    fn from(error: epoxide::Error) -> Error {
        match error {
            epoxide::Error::OutOfMemory { .. } => {
                Error::DoesNotFit(format!("bench: sizes that do not fit: {error}"))
            }
            error => Error::Operation(error),
        }
    }
}
