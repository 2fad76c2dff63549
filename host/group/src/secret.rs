//! The secret that the processes of a job share, and the challenge by which two of them prove it.
//!
//! [`Initiator`] and [`Responder`] are the two ends of the challenge, without input and output: the
//! owner of the socket carries the bytes. The connecting side sends an *opening*, its nonce. The
//! other side answers with a *reply*, its own nonce and its proof. The first then sends its own
//! *proof*. If the other's nonce is known beforehand, the proof is sent with the opening, and one
//! message each way is enough. A proof is the HMAC-SHA256 of all messages so far, and of:
//! - the proving side, so that no proof can be sent back to its origin;
//! - the purpose of the connection ([`Purpose`]), so that a proof is of no use for another purpose;
//! - both nonces, which are new for each connection, so that no proof is of use a second time;
//! - the claims of the two sides, such as ranks and the called address, so that a proof vouches for
//!   nothing else.
//!
//! The same values give the [`Keys`] of the connection. With them each side signs every message
//! that follows: a [`Signer`] signs one direction and numbers its messages. A process between the
//! two that forwards the challenge can therefore not add, change, repeat, drop or reorder a message
//! without being noticed.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use hmac_sha256::HMAC;

use super::env::{Lookup, environment};
use crate::error::{Error, Result};

/// Variable with the job's secret: at least 32 characters, such as `openssl rand -hex 32` writes,
/// the same for all processes of the job. `epoxide launch` gives it to the ranks.
pub const JOB_SECRET: &str = "EPOXIDE_JOB_SECRET";
/// Variable with the path of a file that holds the job's secret, of this user and closed to all
/// others (mode 0600). [`JOB_SECRET`] takes precedence.
pub const JOB_SECRET_FILE: &str = "EPOXIDE_JOB_SECRET_FILE";

/// Shortest secret, in bytes. A connecting process gets a proof to try guesses on.
const SHORTEST: usize = 32;
/// Longest secret; a longer file is something else.
const LONGEST: usize = 4096;

/// Bytes that cannot be guessed.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::system("getrandom", error)),
        }
    }
    Ok(bytes)
}

/// Reads the file of a secret: text that is no secret is rejected, and the text is never shown.
pub fn fuzz_secret_file(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let shown = match JobSecret::named(JOB_SECRET_FILE, &text) {
        Ok(secret) => {
            assert!((SHORTEST..=LONGEST).contains(&secret.0.len()) && !secret.0.contains('\0'));
            format!("{secret:?}")
        }
        Err(error) => error.to_string(),
    };
    let words = text.split_whitespace().filter(|word| word.len() >= SHORTEST);
    words.for_each(|word| assert!(!shown.contains(word), "{shown}"));
}

/// A secret, and texts that are none.
pub fn sample_secret_files() -> Vec<Vec<u8>> {
    vec![[b"0123456789abcdef".repeat(2), b"\n".to_vec()].concat(), b"short".to_vec(), vec![b'x'; LONGEST + 1]]
}

/// Bytes as text.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The secret of a job's processes. With it, ranks and stores accept only connections that prove
/// it.
///
/// The secret is passed in the environment or in a file, never in an argument, which all users of a
/// host can read; nothing here prints it.
#[derive(Clone, PartialEq, Eq)]
pub struct JobSecret(Arc<str>);

impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobSecret(..)")
    }
}

impl JobSecret {
    /// The secret `text`, without white space around it.
    ///
    /// # Errors
    /// Where it has fewer than 32 bytes, or more than 4096.
    pub fn new(text: &str) -> Result<JobSecret> {
        JobSecret::named(JOB_SECRET, text)
    }

    fn named(source: &'static str, text: &str) -> Result<JobSecret> {
        let text = text.trim();
        let length = text.len();
        if !(SHORTEST..=LONGEST).contains(&length) || text.contains('\0') {
            return Err(Error::argument(
                source,
                format!("{length} bytes, not shown"),
                format!(
                    "a job's secret has {SHORTEST} to {LONGEST} bytes and none of them is zero; \
                     `openssl rand -hex 32` makes one"
                ),
            ));
        }
        Ok(JobSecret(text.into()))
    }

    /// A new secret: 256 random bits.
    ///
    /// # Errors
    /// Where the system has no random numbers.
    pub fn generate() -> Result<JobSecret> {
        Ok(JobSecret(hex(&random::<32>()?).into()))
    }

    /// The secret in a file.
    ///
    /// # Errors
    /// Where the file cannot be read, is another user's, may be read or written by others, or holds
    /// no secret.
    pub fn from_file(path: impl AsRef<Path>) -> Result<JobSecret> {
        let path = path.as_ref();
        let fail = |rule: String| Err(Error::argument(JOB_SECRET_FILE, path.display(), rule));
        // Non-blocking: opening a pipe would wait for the other end.
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
        // Checked on the open descriptor, so that the checked file is the one that is read.
        let (mut file, metadata) = match opened.and_then(|file| file.metadata().map(|data| (file, data))) {
            Ok(opened) => opened,
            Err(error) => return fail(format!("cannot be read: {error}")),
        };
        if !metadata.is_file() {
            return fail("must be a file".to_owned());
        }
        let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
        if owner != user {
            return fail(format!(
                "is user {owner}'s, and must be that of user {user}, who runs this; `chown` it"
            ));
        }
        let mode = metadata.mode() & 0o7777;
        if mode & 0o077 != 0 {
            return fail(format!("other users may use it (mode {mode:04o}); `chmod 600` it"));
        }
        let mut text = String::new();
        match file.by_ref().take(LONGEST as u64 + 2).read_to_string(&mut text) {
            Ok(_) => JobSecret::named(JOB_SECRET_FILE, &text),
            Err(error) => fail(format!("cannot be read as text: {error}")),
        }
    }

    /// The secret that the environment has, in [`JOB_SECRET`] or in the file that
    /// [`JOB_SECRET_FILE`] names, if any.
    ///
    /// # Errors
    /// Where one of them is set and is no secret; see [`JobSecret::new`] and
    /// [`JobSecret::from_file`].
    pub fn from_env() -> Result<Option<JobSecret>> {
        JobSecret::from_variables(&environment)
    }

    pub(crate) fn from_variables(variable: Lookup<'_>) -> Result<Option<JobSecret>> {
        match (variable(JOB_SECRET), variable(JOB_SECRET_FILE)) {
            (Some(text), _) => JobSecret::new(&text).map(Some),
            (None, Some(path)) => JobSecret::from_file(path).map(Some),
            (None, None) => Ok(None),
        }
    }

    /// Gives it to a process that is to be started, and to no other.
    pub(crate) fn give_to(&self, command: &mut std::process::Command) {
        command.env(JOB_SECRET, &*self.0).env_remove(JOB_SECRET_FILE);
    }

    /// The proof of one side; the nonces are the initiator's and the responder's.
    fn prove(&self, side: Side, purpose: Purpose, claims: &[u8], nonces: [&[u8]; 2]) -> HMAC {
        self.derive(b"epoxide challenge 1", side, purpose, claims, nonces)
    }

    /// The key that signs the messages of one side behind the same challenge.
    fn signer(&self, side: Side, purpose: Purpose, claims: &[u8], nonces: [&[u8]; 2]) -> Signer {
        let key = self.derive(b"epoxide messages 1", side, purpose, claims, nonces).finalize();
        Signer { keyed: HMAC::new(key), sequence: 0 }
    }

    fn derive(&self, label: &[u8], side: Side, purpose: Purpose, claims: &[u8], nonces: [&[u8]; 2]) -> HMAC {
        let mut mac = HMAC::new(self.0.as_bytes());
        mac.update(label);
        mac.update([side as u8, purpose as u8]);
        // Each part of variable length follows its length, so that no two conversations give the
        // same bytes.
        for part in [nonces[0], nonces[1], claims] {
            mac.update((part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Purpose {
    /// Clients of the TCP store.
    Store = 1,
    /// Ranks of a group.
    Mesh = 2,
    /// Queues between nodes.
    Transport = 3,
    /// Exchange of file descriptors.
    Descriptors = 4,
}

/// The side that proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Side {
    Initiator = 1,
    Responder = 2,
}

/// Bytes of an opening: a nonce.
pub const OPENING: usize = 32;
/// Bytes of a proof.
pub const PROOF: usize = 32;
/// Bytes of a reply: a nonce and a proof.
pub const REPLY: usize = OPENING + PROOF;

type Nonce = [u8; OPENING];

/// The other side did not prove the secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrongSecret;

impl fmt::Display for WrongSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the other side does not know this job's secret; give all processes of the job the same {JOB_SECRET} or \
             {JOB_SECRET_FILE}"
        )
    }
}

/// Bytes of a message's signature.
pub const TAG: usize = 32;

/// A message that its signature does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forged;

impl fmt::Display for Forged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a message that is not signed with this connection's key: something between the two sides added, changed or \
             dropped bytes"
        )
    }
}

/// Signs the messages of one direction of a connection, or checks them, in their order.
pub struct Signer {
    /// Has taken the key and nothing else.
    keyed: HMAC,
    /// The number of the next message.
    sequence: u64,
}

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signer").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl Signer {
    /// The signature of the next message.
    pub fn sign(&mut self, message: &[u8]) -> [u8; TAG] {
        self.next(message).finalize()
    }

    /// Checks the signature of the next message.
    pub fn check(&mut self, message: &[u8], tag: &[u8; TAG]) -> Result<(), Forged> {
        if self.next(message).finalize_verify(tag) { Ok(()) } else { Err(Forged) }
    }

    fn next(&mut self, message: &[u8]) -> HMAC {
        let mut mac = self.keyed.clone();
        // The number has a fixed length, so that the message is all that follows. A connection
        // never sends 2^64 messages.
        mac.update(self.sequence.to_le_bytes());
        mac.update(message);
        self.sequence = self.sequence.wrapping_add(1);
        mac
    }
}

/// The keys with which one side of a connection signs its messages, and checks those of the other
/// side.
#[derive(Debug)]
pub struct Keys {
    /// Signs messages to the peer.
    pub send: Signer,
    /// Checks messages of the peer.
    pub receive: Signer,
}

impl Signer {
    /// With a public key: for fuzzing.
    pub fn fixed() -> Signer {
        Signer { keyed: HMAC::new(b"fuzz"), sequence: 0 }
    }
}

#[cfg(test)]
impl Keys {
    /// The keys of the two sides of a connection.
    pub fn pair() -> (Keys, Keys) {
        let secret = JobSecret::generate().unwrap();
        let initiator = Initiator::new(&secret, Purpose::Store, Vec::new()).unwrap();
        let (responder, reply) = Responder::new(&secret, Purpose::Store, b"", &initiator.opening()).unwrap();
        let (proof, ours) = initiator.answer(&reply).unwrap();
        (ours, responder.check(&proof).unwrap())
    }
}

/// The side that connects.
pub struct Initiator {
    secret: JobSecret,
    purpose: Purpose,
    claims: Vec<u8>,
    nonce: Nonce,
}

impl fmt::Debug for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Initiator").field("purpose", &self.purpose).finish_non_exhaustive()
    }
}

impl Initiator {
    /// Begins a challenge. `claims` is what both sides take to be so.
    pub fn new(secret: &JobSecret, purpose: Purpose, claims: Vec<u8>) -> Result<Initiator> {
        Ok(Initiator { secret: secret.clone(), purpose, claims, nonce: random()? })
    }

    /// The first message to send.
    pub fn opening(&self) -> [u8; OPENING] {
        self.nonce
    }

    /// Takes the reply. Returns the proof to send, and the keys that sign all later messages.
    pub fn answer(&self, reply: &[u8; REPLY]) -> Result<([u8; PROOF], Keys), WrongSecret> {
        let (theirs, proof) = halves(reply);
        let keys = self.check(&theirs, &proof)?;
        Ok((self.proof(&theirs), keys))
    }

    /// The proof for a responder whose nonce is known beforehand and new for the connection. The
    /// proof is sent with the opening.
    pub fn proof(&self, theirs: &[u8]) -> [u8; PROOF] {
        self.prove(Side::Initiator, theirs).finalize()
    }

    /// Takes the proof of a responder whose nonce is known beforehand.
    pub fn check(&self, theirs: &[u8], proof: &[u8; PROOF]) -> Result<Keys, WrongSecret> {
        if !self.prove(Side::Responder, theirs).finalize_verify(proof) {
            return Err(WrongSecret);
        }
        let signer = |side| self.secret.signer(side, self.purpose, &self.claims, [&self.nonce, theirs]);
        Ok(Keys { send: signer(Side::Initiator), receive: signer(Side::Responder) })
    }

    fn prove(&self, side: Side, theirs: &[u8]) -> HMAC {
        self.secret.prove(side, self.purpose, &self.claims, [&self.nonce, theirs])
    }
}

/// The side that was connected to.
pub struct Responder {
    /// The expected message of the other side.
    expected: HMAC,
    keys: Keys,
}

impl fmt::Debug for Responder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Responder(..)")
    }
}

impl Responder {
    /// Answers an opening. Returns the reply to send, and the state that waits for the other side's
    /// proof.
    pub fn new(
        secret: &JobSecret,
        purpose: Purpose,
        claims: &[u8],
        opening: &[u8; OPENING],
    ) -> Result<(Responder, [u8; REPLY])> {
        let nonce: Nonce = random()?;
        let (responder, proof) = Responder::known(secret, purpose, claims, opening, &nonce);
        let mut reply = [0; REPLY];
        reply[..OPENING].copy_from_slice(&nonce);
        reply[OPENING..].copy_from_slice(&proof);
        Ok((responder, reply))
    }

    /// With a nonce that the other side has beforehand, and that is new for the connection. Returns
    /// the proof to send, and the state that waits for the other's.
    pub fn known(
        secret: &JobSecret,
        purpose: Purpose,
        claims: &[u8],
        opening: &[u8; OPENING],
        nonce: &[u8],
    ) -> (Responder, [u8; PROOF]) {
        let prove = |side| secret.prove(side, purpose, claims, [opening, nonce]);
        let signer = |side| secret.signer(side, purpose, claims, [opening, nonce]);
        let keys = Keys { send: signer(Side::Responder), receive: signer(Side::Initiator) };
        (Responder { expected: prove(Side::Initiator), keys }, prove(Side::Responder).finalize())
    }

    /// Takes the proof. Returns the keys that sign all later messages.
    pub fn check(self, proof: &[u8; PROOF]) -> Result<Keys, WrongSecret> {
        // In constant time, wherever the proof differs.
        if self.expected.finalize_verify(proof) { Ok(self.keys) } else { Err(WrongSecret) }
    }
}

fn halves(reply: &[u8; REPLY]) -> (Nonce, [u8; PROOF]) {
    let (mut nonce, mut proof) = ([0; OPENING], [0; PROOF]);
    nonce.copy_from_slice(&reply[..OPENING]);
    proof.copy_from_slice(&reply[OPENING..]);
    (nonce, proof)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use proptest::prelude::*;

    use super::*;

    const PURPOSES: [Purpose; 4] = [Purpose::Store, Purpose::Mesh, Purpose::Transport, Purpose::Descriptors];

    fn secret(byte: u8) -> JobSecret {
        JobSecret::new(&char::from(b'a' + byte).to_string().repeat(40)).unwrap()
    }

    #[test]
    fn it_is_never_printed() {
        let secret = JobSecret::new("correct horse battery staple, and more of it").unwrap();
        let initiator = Initiator::new(&secret, Purpose::Mesh, Vec::new()).unwrap();
        let (responder, _) = Responder::new(&secret, Purpose::Mesh, b"", &initiator.opening()).unwrap();
        let printed = format!("{secret:?} {initiator:?} {responder:?} {:#?}", Some(&secret));
        assert!(!printed.contains("horse") && printed.contains("JobSecret(..)"), "{printed}");
        let error = JobSecret::new("short horse").unwrap_err().to_string();
        assert!(
            !error.contains("horse") && error.contains("11 bytes") && error.contains("openssl"),
            "{error}"
        );
        assert_ne!(JobSecret::generate().unwrap(), JobSecret::generate().unwrap());
    }

    #[test]
    fn files_must_be_closed_to_others() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        let text = "0123456789abcdef0123456789abcdef";
        std::fs::write(&path, format!("{text}\n")).unwrap();
        let chmod = |mode| std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        for mode in [0o600, 0o400] {
            chmod(mode);
            assert_eq!(JobSecret::from_file(&path).unwrap(), JobSecret::new(text).unwrap());
        }
        for mode in [0o644, 0o640, 0o604, 0o620] {
            chmod(mode);
            let error = JobSecret::from_file(&path).unwrap_err().to_string();
            assert!(error.contains("chmod 600"), "{mode:o}: {error}");
        }
        chmod(0o600);
        std::fs::write(&path, "too short").unwrap();
        assert!(JobSecret::from_file(&path).unwrap_err().to_string().contains("9 bytes, not shown"));
        assert!(JobSecret::from_file(directory.path()).unwrap_err().to_string().contains("must be a file"));
        let missing = JobSecret::from_file(directory.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("cannot be read"), "{missing}");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
            let error = JobSecret::from_file(&path).unwrap_err().to_string();
            assert!(error.contains("user 65534's") && error.contains("chown"), "{error}");
        } else {
            eprintln!("not root: a file of another user is not tried");
        }
    }

    #[test]
    fn the_environment_goes_before_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        std::fs::write(&path, "f".repeat(32)).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let text = |character: &str| character.repeat(32);
        let look = |variables: &[(&str, String)]| {
            let find =
                |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone());
            JobSecret::from_variables(&find)
        };
        let file = (JOB_SECRET_FILE, path.to_str().unwrap().to_owned());
        assert_eq!(look(&[]).unwrap(), None);
        assert_eq!(look(std::slice::from_ref(&file)).unwrap().unwrap(), JobSecret::new(&text("f")).unwrap());
        let both = [file, (JOB_SECRET, text("e"))];
        assert_eq!(look(&both).unwrap().unwrap(), JobSecret::new(&text("e")).unwrap());
        assert!(look(&[(JOB_SECRET, "x".to_owned())]).is_err(), "never taken for none");
    }

    #[test]
    fn a_proof_that_is_sent_back_or_sent_again_is_refused() {
        let secret = secret(0);
        let initiator = Initiator::new(&secret, Purpose::Mesh, b"1 to 0".to_vec()).unwrap();
        let opening = initiator.opening();
        let (responder, reply) = Responder::new(&secret, Purpose::Mesh, b"1 to 0", &opening).unwrap();
        let (_, theirs) = halves(&reply);
        // Sent back: the responder's own proof is none of an initiator's.
        assert_eq!(responder.check(&theirs).unwrap_err(), WrongSecret);
        let (proof, _) = initiator.answer(&reply).unwrap();
        // Sent again: the same opening and proof at another connection, whose nonce is another.
        let (again, other) = Responder::new(&secret, Purpose::Mesh, b"1 to 0", &opening).unwrap();
        assert_ne!(other, reply);
        assert_eq!(again.check(&proof).unwrap_err(), WrongSecret);
        // An old reply to a new opening.
        let initiator = Initiator::new(&secret, Purpose::Mesh, b"1 to 0".to_vec()).unwrap();
        assert_eq!(initiator.answer(&reply).unwrap_err(), WrongSecret);
        // A stranger that echoes what it gets has no proof of a responder.
        let initiator = Initiator::new(&secret, Purpose::Mesh, Vec::new()).unwrap();
        let mut echo = [0; REPLY];
        echo[..OPENING].copy_from_slice(&initiator.opening());
        assert_eq!(initiator.answer(&echo).unwrap_err(), WrongSecret);
    }

    #[test]
    fn with_a_nonce_that_is_known_one_message_each_way_is_enough() {
        let secret = secret(0);
        let initiator = Initiator::new(&secret, Purpose::Transport, b"1 to 0".to_vec()).unwrap();
        let known = |secret, nonce: &[u8]| {
            Responder::known(secret, Purpose::Transport, b"1 to 0", &initiator.opening(), nonce)
        };
        let (responder, theirs) = known(&secret, b"nonce");
        let mut receiver = responder.check(&initiator.proof(b"nonce")).unwrap();
        let mut sender = initiator.check(b"nonce", &theirs).unwrap();
        let tag = sender.send.sign(b"first");
        assert_eq!(receiver.receive.check(b"first", &tag), Ok(()));
        // With another nonce, and with another secret.
        assert_eq!(known(&secret, b"other").0.check(&initiator.proof(b"nonce")).unwrap_err(), WrongSecret);
        let other = JobSecret::new(&"o".repeat(32)).unwrap();
        let (responder, theirs) = known(&other, b"nonce");
        assert_eq!(responder.check(&initiator.proof(b"nonce")).unwrap_err(), WrongSecret);
        assert_eq!(initiator.check(b"nonce", &theirs).unwrap_err(), WrongSecret);
        // The proofs of the two sides are none of each other.
        let (responder, theirs) = known(&secret, b"nonce");
        assert_eq!(responder.check(&theirs).unwrap_err(), WrongSecret);
        assert_eq!(initiator.check(b"nonce", &initiator.proof(b"nonce")).unwrap_err(), WrongSecret);
    }

    #[test]
    fn a_signature_is_for_one_message_at_one_place_of_one_direction() {
        let (mut ours, mut theirs) = Keys::pair();
        let mut sign = |message: &[u8]| ours.send.sign(message);
        let (first, second, third) = (sign(b"set"), sign(b"set"), sign(b"get"));
        assert_ne!(first, second, "the same bytes are another message");
        assert_eq!(theirs.receive.check(b"set", &first), Ok(()));
        // Repeated and changed.
        assert_eq!(theirs.receive.check(b"set", &first), Err(Forged));
        assert_eq!(theirs.receive.check(b"get", &third), Ok(()));
        assert_eq!(theirs.receive.check(b"sets", &sign(b"set")), Err(Forged));
        // Sent back.
        assert_eq!(ours.receive.check(b"set", &first), Err(Forged));
        // With one before it left out.
        let (mut ours, mut theirs) = Keys::pair();
        let _ = ours.send.sign(b"set");
        assert_eq!(theirs.receive.check(b"get", &ours.send.sign(b"get")), Err(Forged));
        // From another connection with the same secret.
        let (_, mut others) = Keys::pair();
        assert_eq!(others.receive.check(b"set", &first), Err(Forged));
    }

    proptest! {
        /// Both sides succeed exactly where secret, purpose and claims are the same and no bit was
        /// changed on the way.
        #[test]
        fn both_sides_succeed_exactly_where_all_is_the_same(
            secrets in (0u8..3, 0u8..3),
            purposes in (0usize..4, 0usize..4),
            ours in proptest::collection::vec(any::<u8>(), 0..4),
            theirs in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..4)),
            flip in proptest::option::of((0usize..OPENING + REPLY + PROOF, 0u8..8)),
        ) {
            let theirs = theirs.unwrap_or_else(|| ours.clone());
            let same = secrets.0 == secrets.1 && purposes.0 == purposes.1 && ours == theirs;
            let flipped = |at: usize, bytes: &mut [u8]| {
                let Some((position, bit)) = flip else { return };
                if let Some(byte) = position.checked_sub(at).and_then(|position| bytes.get_mut(position)) {
                    *byte ^= 1 << bit;
                }
            };
            let initiator = Initiator::new(&secret(secrets.0), PURPOSES[purposes.0], ours).unwrap();
            let mut opening = initiator.opening();
            flipped(0, &mut opening);
            let (responder, mut reply) =
                Responder::new(&secret(secrets.1), PURPOSES[purposes.1], &theirs, &opening).unwrap();
            flipped(OPENING, &mut reply);
            let answer = initiator.answer(&reply);
            let early = flip.is_some_and(|(position, _)| position < OPENING + REPLY);
            prop_assert_eq!(answer.is_ok(), same && !early);
            if let Ok((mut proof, _)) = answer {
                flipped(OPENING + REPLY, &mut proof);
                prop_assert_eq!(responder.check(&proof).is_ok(), flip.is_none());
            }
        }
    }
}
