//! Stream capture: records enqueued work, over one or several streams, and replays it.

use std::sync::Arc;
use std::thread::ThreadId;

use super::stream::Mark;
use super::work::{Launch, Transfer};

/// A recorded op.
#[derive(Debug, Clone)]
pub(super) enum Step {
    Launch(Launch),
    Transfer(Transfer),
    /// Passes the mark of this number.
    Record(usize),
    /// Waits for the mark of this number.
    Wait(usize),
}

/// A recording under way. Lane 0 is the stream it began on. Streams that wait for an event recorded
/// in it join as further lanes, and must be joined back before it ends.
pub(super) struct Capture {
    /// The streams, by lane.
    pub(super) lanes: Vec<u64>,
    /// The thread that began it; it may not make calls that cannot be recorded.
    pub(super) thread: ThreadId,
    /// Why it cannot be finished any more.
    pub(super) invalid: Option<String>,
    steps: Vec<(usize, Step)>,
    /// `seen[a][b]`: how many ops of lane `b` come before the end of lane `a`.
    seen: Vec<Vec<usize>>,
    /// For each mark, `seen` of its lane when it was recorded.
    marks: Vec<Vec<usize>>,
}

impl Capture {
    pub(super) fn new(stream: u64) -> Capture {
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
    pub(super) fn join(&mut self, stream: u64) -> usize {
        self.lanes.push(stream);
        for seen in &mut self.seen {
            seen.push(0);
        }
        self.seen.push(vec![0; self.lanes.len()]);
        self.lanes.len() - 1
    }

    /// Records a launch or a transfer.
    pub(super) fn work(&mut self, lane: usize, step: Step) {
        self.seen[lane][lane] += 1;
        self.steps.push((lane, step));
    }

    /// Records an event; returns the mark's number.
    pub(super) fn record(&mut self, lane: usize) -> usize {
        self.marks.push(self.seen[lane].clone());
        let mark = self.marks.len() - 1;
        self.steps.push((lane, Step::Record(mark)));
        mark
    }

    /// Makes a lane wait for a mark.
    pub(super) fn wait(&mut self, lane: usize, mark: usize) {
        // The mark may be older than some lanes: its missing entries count as 0.
        for (seen, at_mark) in self.seen[lane].iter_mut().zip(&self.marks[mark]) {
            *seen = (*seen).max(*at_mark);
        }
        self.steps.push((lane, Step::Wait(mark)));
    }

    /// The recording, or a stream with work that lane 0 does not wait for.
    pub(super) fn finish(self) -> Result<RecordedGraph, u64> {
        for (lane, stream) in self.lanes.iter().enumerate().skip(1) {
            if self.seen[0][lane] < self.seen[lane][lane] {
                return Err(*stream);
            }
        }
        Ok(RecordedGraph {
            steps: self.steps.into(),
            lanes: self.lanes.len(),
            marks: self.marks.len(),
            last_launch: None,
        })
    }
}

/// A finished recording.
#[derive(Debug, Clone)]
pub(super) struct RecordedGraph {
    /// In recorded order, each with its lane.
    pub(super) steps: Arc<[(usize, Step)]>,
    pub(super) lanes: usize,
    pub(super) marks: usize,
    /// The end of the last launch: a graph does not overlap itself.
    pub(super) last_launch: Option<Arc<Mark>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill() -> Step {
        Step::Transfer(Transfer::Fill { target: 0, value: 0, bytes: 0 })
    }

    #[test]
    fn work_of_a_forked_lane_must_be_joined() {
        let mut capture = Capture::new(10);
        let fork = capture.record(0);
        let side = capture.join(11);
        capture.wait(side, fork);
        assert_eq!(side, 1);
        capture.work(side, fill());
        let joined = capture.record(side);
        capture.wait(0, joined);
        capture.work(side, fill());
        assert_eq!(capture.finish().err(), Some(11));
    }

    #[test]
    fn a_join_may_go_through_another_lane() {
        let mut capture = Capture::new(10);
        let fork = capture.record(0);
        let (a, b) = (capture.join(11), capture.join(12));
        capture.wait(a, fork);
        capture.wait(b, fork);
        capture.work(a, fill());
        let done_a = capture.record(a);
        capture.wait(b, done_a);
        capture.work(b, fill());
        let done_b = capture.record(b);
        capture.wait(0, done_b);
        let graph = capture.finish().unwrap_or_else(|stream| panic!("stream {stream} is not joined"));
        assert_eq!((graph.lanes, graph.marks, graph.steps.len()), (3, 3, 9));
    }
}
