//! A device in a process of its own.
//!
//! A fault of a kernel may leave its process without a GPU: after `CUDA_ERROR_ILLEGAL_INSTRUCTION`
//! NVIDIA's driver makes no context there any more. So a process runs programs up to the first
//! fault, and a new one takes its place. The two ends of a socket carry requests and answers; the
//! process has its end as standard input.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::target::{Failure, Job, Target};

/// The longest that a killed process may take to end, before it is left alone.
const LONGEST_END: Duration = Duration::from_secs(10);

/// A device behind a process that [`serve`]s it.
pub struct Worker {
    name: &'static str,
    description: String,
    command: Box<dyn Fn() -> Command>,
    /// The longest that an answer may take. A process without one is killed.
    deadline: Duration,
    /// `None` behind a fault.
    running: Option<Running>,
}

struct Running {
    process: Child,
    socket: UnixStream,
}

impl Worker {
    /// Starts the first process. `command` makes one that calls [`serve`].
    ///
    /// # Errors
    /// The process does not start, or has no such device.
    pub fn start(
        name: &'static str,
        deadline: Duration,
        command: impl Fn() -> Command + 'static,
    ) -> Result<Self> {
        let command = Box::new(command);
        let (running, description) = Running::start(&command, deadline)?;
        Ok(Self { name, description, command, deadline, running: Some(running) })
    }
}

impl Running {
    /// A process, and the description of its device.
    fn start(command: &dyn Fn() -> Command, deadline: Duration) -> Result<(Self, String)> {
        let (socket, other) = UnixStream::pair().context("no socket")?;
        socket.set_read_timeout(Some(deadline))?;
        socket.set_write_timeout(Some(deadline))?;
        let mut command = command();
        let process = command.stdin(OwnedFd::from(other)).spawn().context("no process for the device")?;
        // The command has the other end too, which would keep the socket open.
        drop(command);
        let mut running = Self { process, socket };
        match Answer::read(&mut running.socket) {
            Ok(Answer::Ready(description)) => Ok((running, description)),
            Ok(Answer::Failed(Failure::Refused(text))) => bail!("{text}"),
            Ok(_) => bail!("the process of the device answers out of turn"),
            Err(error) => bail!("the device does not come up: {}", running.why(&error, deadline)),
        }
    }

    fn run(&mut self, ptx: &str, jobs: &[&Job]) -> io::Result<Answer> {
        write_request(&mut self.socket, ptx, jobs)?;
        Answer::read(&mut self.socket)
    }

    /// Why there is no answer: the process has ended, or takes too long.
    fn why(&mut self, error: &io::Error, deadline: Duration) -> String {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                format!("no answer in {} s", deadline.as_secs_f32())
            }
            _ => match self.end() {
                Some(status) => format!("its process has ended: {status}"),
                None => format!("its process cannot be reached: {error}"),
            },
        }
    }

    /// The exit status of the process, which ends soon.
    fn end(&mut self) -> Option<std::process::ExitStatus> {
        let begin = Instant::now();
        while begin.elapsed() < LONGEST_END {
            if let Ok(Some(status)) = self.process.try_wait() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already, or holds nothing that a kill would damage. A driver may keep a
        // process whose kernel hangs for long, so the wait has an end.
        let _ = self.process.kill();
        self.end();
    }
}

impl Target for Worker {
    fn name(&self) -> &'static str {
        self.name
    }

    fn description(&self) -> String {
        self.description.clone()
    }

    fn run(&mut self, ptx: &str, jobs: &[&Job]) -> Result<Vec<Vec<u64>>, Failure> {
        let mut running = match self.running.take() {
            Some(running) => running,
            None => {
                Running::start(&self.command, self.deadline)
                    .map_err(|error| Failure::Lost(format!("{error:#}")))?
                    .0
            }
        };
        let failure = match running.run(ptx, jobs) {
            Ok(Answer::Words(words)) => {
                self.running = Some(running);
                return Ok(words);
            }
            Ok(Answer::Failed(failure @ Failure::Refused(_))) => {
                self.running = Some(running);
                return Err(failure);
            }
            Ok(Answer::Failed(Failure::Faulted(text) | Failure::Lost(text))) => text,
            Ok(Answer::Ready(_)) => "the process of the device answers out of turn".to_owned(),
            Err(error) => running.why(&error, self.deadline),
        };
        Err(Failure::Faulted(failure))
    }
}

/// Runs programs from standard input on a device, up to the first fault or the end of the other
/// process.
///
/// # Errors
/// Standard input is no socket, or it fails.
pub fn serve(open: impl FnOnce() -> Result<Box<dyn Target>>) -> Result<()> {
    let mut socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut target = match open() {
        Ok(target) => target,
        Err(error) => {
            return Ok(Answer::Failed(Failure::Refused(format!("{error:#}"))).write(&mut socket)?);
        }
    };
    Answer::Ready(target.description()).write(&mut socket)?;
    while let Some((ptx, jobs)) = read_request(&mut socket)? {
        let jobs: Vec<&Job> = jobs.iter().collect();
        let answer = match target.run(&ptx, &jobs) {
            Ok(words) => Answer::Words(words),
            Err(failure) => Answer::Failed(failure),
        };
        answer.write(&mut socket)?;
        if matches!(answer, Answer::Failed(Failure::Faulted(_) | Failure::Lost(_))) {
            // The driver's end of a context waits for a kernel that hangs.
            std::process::exit(0);
        }
    }
    Ok(())
}

/// An answer of a process.
enum Answer {
    /// The device is there, with its description.
    Ready(String),
    Words(Vec<Vec<u64>>),
    Failed(Failure),
}

impl Answer {
    fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut bytes = vec![];
        let (kind, text) = match self {
            Answer::Ready(text) => (0, text.as_str()),
            Answer::Words(_) => (1, ""),
            Answer::Failed(Failure::Refused(text)) => (2, text.as_str()),
            Answer::Failed(Failure::Faulted(text)) => (3, text.as_str()),
            Answer::Failed(Failure::Lost(text)) => (4, text.as_str()),
        };
        put(&mut bytes, kind);
        put_text(&mut bytes, text);
        if let Answer::Words(lists) = self {
            put(&mut bytes, lists.len());
            lists.iter().for_each(|words| put_words(&mut bytes, words));
        }
        to.write_all(&bytes)
    }

    fn read(from: &mut impl Read) -> io::Result<Self> {
        let (kind, text) = (take(from)?, take_text(from)?);
        Ok(match kind {
            0 => Answer::Ready(text),
            1 => Answer::Words((0..take(from)?).map(|_| take_words(from)).collect::<io::Result<_>>()?),
            2 => Answer::Failed(Failure::Refused(text)),
            3 => Answer::Failed(Failure::Faulted(text)),
            4 => Answer::Failed(Failure::Lost(text)),
            _ => return Err(io::Error::other("an unknown answer")),
        })
    }
}

fn write_request(to: &mut impl Write, ptx: &str, jobs: &[&Job]) -> io::Result<()> {
    let mut bytes = vec![];
    put(&mut bytes, jobs.len());
    put_text(&mut bytes, ptx);
    for job in jobs {
        put_text(&mut bytes, &job.kernel);
        put(&mut bytes, job.threads);
        put_words(&mut bytes, &job.input);
        put(&mut bytes, job.outputs);
    }
    to.write_all(&bytes)
}

/// The text of a module and its jobs. `None` where no more come.
fn read_request(from: &mut impl Read) -> io::Result<Option<(String, Vec<Job>)>> {
    let jobs = match take(from) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        jobs => jobs?,
    };
    let ptx = take_text(from)?;
    let one = |_| {
        Ok(Job {
            kernel: take_text(from)?,
            threads: take(from)?,
            input: take_words(from)?,
            outputs: take(from)?,
        })
    };
    Ok(Some((ptx, (0..jobs).map(one).collect::<io::Result<_>>()?)))
}

fn put(to: &mut Vec<u8>, number: usize) {
    to.extend((number as u64).to_le_bytes());
}

fn put_text(to: &mut Vec<u8>, text: &str) {
    put(to, text.len());
    to.extend(text.as_bytes());
}

fn put_words(to: &mut Vec<u8>, words: &[u64]) {
    put(to, words.len());
    to.extend(words.iter().flat_map(|word| word.to_le_bytes()));
}

fn take(from: &mut impl Read) -> io::Result<usize> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    usize::try_from(u64::from_le_bytes(bytes)).map_err(io::Error::other)
}

fn take_bytes(from: &mut impl Read, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    let got = from.take(len as u64).read_to_end(&mut bytes)?;
    if got == len { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

fn take_text(from: &mut impl Read) -> io::Result<String> {
    let len = take(from)?;
    String::from_utf8(take_bytes(from, len)?).map_err(io::Error::other)
}

fn take_words(from: &mut impl Read) -> io::Result<Vec<u64>> {
    let len = take(from)?;
    let bytes = take_bytes(from, len.saturating_mul(8))?;
    Ok(bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect())
}

#[cfg(test)]
mod tests {
    use super::super::target::Virtual;
    use super::*;

    const ROLE: &str = "EPOXIDE_TEST_ROLE";

    /// A device that no kernel runs on any more once one has failed.
    struct Fragile {
        failed: bool,
    }

    impl Target for Fragile {
        fn name(&self) -> &'static str {
            "fragile"
        }

        fn description(&self) -> String {
            "a device for one failure".to_owned()
        }

        fn run(&mut self, ptx: &str, jobs: &[&Job]) -> Result<Vec<Vec<u64>>, Failure> {
            if self.failed {
                return Err(Failure::Faulted("nothing runs after a failure".to_owned()));
            }
            if ptx.contains("abort") {
                std::process::abort();
            }
            if ptx.contains("hang") {
                std::thread::sleep(Duration::from_secs(600));
            }
            let result = Virtual::Fast.run(ptx, jobs);
            self.failed = matches!(result, Err(Failure::Faulted(_)));
            result
        }
    }

    /// The process of the device, where a test has started it.
    #[test]
    fn serves() {
        let Some(role) = std::env::var_os(ROLE) else { return };
        serve(|| match role.to_str() {
            Some("no device") => bail!("no such GPU"),
            #[cfg(feature = "cuda")]
            Some("cuda") => Ok(Box::new(super::super::cuda::Cuda::open(0)?)),
            _ => Ok(Box::new(Fragile { failed: false })),
        })
        .unwrap();
    }

    fn worker(role: &'static str, deadline: Duration) -> Result<Worker> {
        Worker::start("fragile", deadline, move || {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "fuzz::worker::tests::serves"]).env(ROLE, role);
            command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
            command
        })
    }

    fn run(worker: &mut Worker, body: &str) -> Result<Vec<Vec<u64>>, Failure> {
        let ptx = format!(
            ".version 8.5\n.target sm_90\n.address_size 64\n.global .align 64 .b8 ZEROS[128];\n.visible .entry k(.param .u64 in, .param .u64 out) {{
.reg .b64 %rd<4>; ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; ld.global.u64 %rd3, [%rd1];
{body}\nst.global.u64 [%rd2], %rd3; ret; }}\n"
        );
        let job = Job { kernel: "k".to_owned(), threads: 1, input: vec![41], outputs: 1 };
        worker.run(&ptx, &[&job])
    }

    const ADD: &str = "add.u64 %rd3, %rd3, 1;";

    /// Runs programs that fail, each with one behind it that does not.
    fn fails_and_goes_on(worker: &mut Worker, failing: &[(&str, &str)]) {
        assert_eq!(run(worker, ADD).unwrap(), [[42]]);
        for (body, why) in failing {
            let Err(Failure::Faulted(text)) = run(worker, body) else { panic!("{body} fails") };
            assert!(text.contains(why), "{body}: {text}");
            assert_eq!(run(worker, ADD).unwrap(), [[42]], "after {body}");
        }
    }

    #[test]
    fn a_device_that_is_lost_with_its_process_comes_back_with_a_new_one() {
        let mut worker = worker("device", Duration::from_secs(60)).unwrap();
        assert_eq!(worker.description(), "a device for one failure");
        let failing = [
            ("trap;", "trap"),
            ("ld.global.u64 %rd3, [%rd3];", "not a multiple of 8"),
            ("// abort", "its process has ended: signal: 6"),
        ];
        fails_and_goes_on(&mut worker, &failing);
        // A program that does not load costs no process.
        let before = worker.running.as_ref().unwrap().process.id();
        assert!(matches!(run(&mut worker, "nonsense;"), Err(Failure::Refused(_))));
        assert_eq!(run(&mut worker, ADD).unwrap(), [[42]]);
        assert_eq!(worker.running.as_ref().unwrap().process.id(), before);
    }

    #[cfg(feature = "cuda")]
    #[test]
    #[ignore = "needs a GPU and its driver, or the virtual libcuda.so.1"]
    fn programs_run_on_a_gpu_after_others_have_failed() {
        let mut worker = worker("cuda", Duration::from_secs(60)).unwrap();
        println!("{}", worker.description());
        // A copy of a box without a tensor map is an illegal instruction.
        let copy = ".shared .align 128 .b8 S[128]; .reg .b32 %r<3>; mov.u32 %r1, S; mov.u32 %r2, 0;
mov.u64 %rd1, ZEROS; cvta.global.u64 %rd1, %rd1;
cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd1, {%r2}], [%r1];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;";
        let failing = [
            (copy, "CUDA_ERROR_ILLEGAL_INSTRUCTION"),
            ("ld.global.u64 %rd3, [%rd3];", "CUDA_ERROR_MISALIGNED_ADDRESS"),
            ("mov.u64 %rd3, 0; ld.global.u64 %rd3, [%rd3];", "CUDA_ERROR_ILLEGAL_ADDRESS"),
            ("trap;", "CUDA_ERROR_"),
        ];
        fails_and_goes_on(&mut worker, &failing);
        let Err(Failure::Refused(text)) = run(&mut worker, "nonsense;") else { panic!("it does not load") };
        assert!(text.contains("CUDA_ERROR_INVALID_PTX"), "{text}");
    }

    #[test]
    fn a_device_that_does_not_answer_is_killed() {
        let mut worker = worker("device", Duration::from_secs(2)).unwrap();
        let Err(Failure::Faulted(text)) = run(&mut worker, "// hang") else { panic!("it hangs") };
        assert_eq!(text, "no answer in 2 s");
        assert_eq!(run(&mut worker, "").unwrap(), [[41]]);
    }

    #[test]
    fn a_machine_without_the_device_says_so() {
        let Err(error) = worker("no device", Duration::from_secs(60)) else { panic!("there is none") };
        assert_eq!(error.to_string(), "no such GPU");
    }
}
