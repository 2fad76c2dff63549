//! Stream capture: records enqueued work, over one or several streams, and replays it.

use std::sync::Arc;
use std::thread::ThreadId;

use super::{Mark, Op, Queue};

/// A recorded op.
#[derive(Debug, Clone)]
pub enum Step<W> {
    /// Work.
    Work(W),
    /// Passes the mark of this number.
    Record(usize),
    /// Waits for the mark of this number.
    Wait(usize),
}

/// A recording under way. Lane 0 is the stream it began on. Streams that wait for an event recorded
/// in it join as further lanes, and must be joined back before it ends.
#[derive(Debug)]
pub struct Capture<W> {
    /// The streams, by lane.
    pub lanes: Vec<u64>,
    /// The thread that began it; it may not make calls that cannot be recorded.
    pub thread: ThreadId,
    /// Why it cannot be finished any more.
    pub invalid: Option<String>,
    steps: Vec<(usize, Step<W>)>,
    /// `seen[a][b]`: how many ops of lane `b` come before the end of lane `a`.
    seen: Vec<Vec<usize>>,
    /// For each mark, `seen` of its lane when it was recorded.
    marks: Vec<Vec<usize>>,
}

impl<W> Capture<W> {
    /// A capture by the calling thread that begins on `stream`.
    #[must_use]
    pub fn new(stream: u64) -> Self {
        Capture {
            lanes: vec![stream],
            thread: std::thread::current().id(),
            invalid: None,
            steps: Vec::new(),
            seen: vec![vec![0]],
            marks: Vec::new(),
        }
    }

    /// Adds a stream and returns its lane.
    pub fn join(&mut self, stream: u64) -> usize {
        self.lanes.push(stream);
        for seen in &mut self.seen {
            seen.push(0);
        }
        self.seen.push(vec![0; self.lanes.len()]);
        self.lanes.len() - 1
    }

    /// Records work.
    pub fn work(&mut self, lane: usize, work: W) {
        self.seen[lane][lane] += 1;
        self.steps.push((lane, Step::Work(work)));
    }

    /// Records an event; returns the mark's number.
    pub fn record(&mut self, lane: usize) -> usize {
        self.marks.push(self.seen[lane].clone());
        let mark = self.marks.len() - 1;
        self.steps.push((lane, Step::Record(mark)));
        mark
    }

    /// Makes a lane wait for a mark.
    pub fn wait(&mut self, lane: usize, mark: usize) {
        // The mark may be older than some lanes: its missing entries count as 0.
        for (seen, at_mark) in self.seen[lane].iter_mut().zip(&self.marks[mark]) {
            *seen = (*seen).max(*at_mark);
        }
        self.steps.push((lane, Step::Wait(mark)));
    }

    /// The recording.
    ///
    /// # Errors
    /// A stream with work that lane 0 does not wait for.
    pub fn finish(self) -> Result<Graph<W>, u64> {
        for (lane, stream) in self.lanes.iter().enumerate().skip(1) {
            if self.seen[0][lane] < self.seen[lane][lane] {
                return Err(*stream);
            }
        }
        Ok(Graph {
            steps: self.steps.into(),
            lanes: self.lanes.len(),
            marks: self.marks.len(),
            last_launch: None,
        })
    }
}

/// A finished recording.
#[derive(Debug, Clone)]
pub struct Graph<W> {
    /// In recorded order, each with its lane.
    steps: Arc<[(usize, Step<W>)]>,
    lanes: usize,
    marks: usize,
    /// The end of the last launch: a graph does not overlap itself.
    last_launch: Option<Arc<Mark>>,
}

impl<W> Graph<W> {
    /// All work in recorded order.
    pub fn work(&self) -> impl Iterator<Item = &W> {
        self.steps.iter().filter_map(|(_, step)| match step {
            Step::Work(work) => Some(work),
            Step::Record(_) | Step::Wait(_) => None,
        })
    }

    /// A launch: the ops of the stream that launches it, and further queues for the other lanes.
    /// These begin with that stream, and it waits for them. `work` makes what is enqueued.
    pub fn launch<E>(&mut self, mut work: impl FnMut(&W) -> E) -> (Vec<Op<E>>, Vec<Queue<E>>) {
        let marks: Vec<Arc<Mark>> = (0..self.marks).map(|_| Arc::default()).collect();
        let (begin, end) = (Arc::new(Mark::default()), Arc::new(Mark::default()));
        let previous = self.last_launch.replace(end.clone());
        let mut stream: Vec<Op<E>> = previous.into_iter().map(Op::Wait).collect();
        stream.push(Op::Record(begin.clone()));
        let side = || Queue {
            ops: [Op::Wait(begin.clone())].into(),
            submitted: 1,
            closed: true,
            ..Queue::default()
        };
        let mut sides: Vec<Queue<E>> = (1..self.lanes).map(|_| side()).collect();
        for (lane, step) in self.steps.iter() {
            let op = match step {
                Step::Work(recorded) => Op::Work(work(recorded)),
                Step::Record(mark) => Op::Record(marks[*mark].clone()),
                Step::Wait(mark) => Op::Wait(marks[*mark].clone()),
            };
            match lane.checked_sub(1) {
                None => stream.push(op),
                Some(side) => sides[side].push(op),
            }
        }
        stream.push(Op::Record(end));
        (stream, sides)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_of_a_forked_lane_must_be_joined() {
        let mut capture = Capture::new(10);
        let fork = capture.record(0);
        let side = capture.join(11);
        capture.wait(side, fork);
        assert_eq!(side, 1);
        capture.work(side, ());
        let joined = capture.record(side);
        capture.wait(0, joined);
        capture.work(side, ());
        assert_eq!(capture.finish().err(), Some(11));
    }

    #[test]
    fn a_join_may_go_through_another_lane() {
        let mut capture = Capture::new(10);
        let fork = capture.record(0);
        let (a, b) = (capture.join(11), capture.join(12));
        capture.wait(a, fork);
        capture.wait(b, fork);
        capture.work(a, ());
        let done_a = capture.record(a);
        capture.wait(b, done_a);
        capture.work(b, ());
        let done_b = capture.record(b);
        capture.wait(0, done_b);
        let graph = capture.finish().unwrap_or_else(|stream| panic!("stream {stream} is not joined"));
        assert_eq!((graph.lanes, graph.marks, graph.steps.len()), (3, 3, 9));
    }
}
