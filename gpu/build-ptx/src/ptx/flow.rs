//! The control flow of a kernel: its basic blocks, and what a branch decides about.

use std::collections::HashMap;
use std::ops::Range;

use super::text::Statement;

/// The control flow graph of one body. Behind its blocks there is one more node, [`Flow::exit`], to
/// which every path leads.
#[derive(Debug)]
pub struct Flow {
    /// The blocks, in the order of the text. The first one is the entry.
    pub blocks: Vec<Block>,
    /// The nearest post-dominator of each block: the nearest node on every path from it to the
    /// exit. `None` if no path leads to the exit.
    after: Vec<Option<usize>>,
}

/// Statements that are executed one after the other.
#[derive(Debug)]
pub struct Block {
    /// Indices of its statements in the body.
    pub statements: Range<usize>,
    /// Where control goes from its end; two for a branch that has a choice.
    pub successors: Vec<usize>,
}

impl Flow {
    /// The control flow of a body. A branch to a label that is not there leads to the exit; an
    /// indexed branch leads to every label.
    pub fn of(body: &[Statement]) -> Self {
        let mut starts = vec![0];
        for (index, statement) in body.iter().enumerate() {
            if statement.label().is_some() {
                starts.push(index);
            }
            if ends_block(statement) {
                starts.push(index + 1);
            }
        }
        starts.sort_unstable();
        starts.dedup();
        starts.retain(|start| *start < body.len());
        let ends = starts.iter().skip(1).copied().chain([body.len()]);
        let ranges: Vec<Range<usize>> = starts.iter().copied().zip(ends).map(|(from, to)| from..to).collect();

        let exit = ranges.len();
        let mut labels = HashMap::new();
        for (block, range) in ranges.iter().enumerate() {
            labels.extend(body[range.clone()].iter().filter_map(Statement::label).map(|name| (name, block)));
        }
        let blocks: Vec<Block> = ranges
            .into_iter()
            .enumerate()
            .map(|(block, statements)| {
                let mut successors = Vec::new();
                let last = body[statements.clone()].last().filter(|last| ends_block(last));
                if let Some(last) = last {
                    if last.is("bra") {
                        let target = last.text.rsplit(' ').next().and_then(|name| labels.get(name));
                        successors.push(target.copied().unwrap_or(exit));
                    } else if last.is("brx") {
                        successors.extend(labels.values());
                    } else {
                        successors.push(exit);
                    }
                }
                // Without a branch, and where its guard is false, control goes on to the next
                // block.
                if last.is_none_or(|last| last.guard().is_some()) {
                    successors.push(block + 1);
                }
                successors.sort_unstable();
                successors.dedup();
                Block { statements, successors }
            })
            .collect();
        let after = post_dominators(&blocks);
        Self { blocks, after }
    }

    /// The node behind all blocks.
    pub fn exit(&self) -> usize {
        self.blocks.len()
    }

    /// The blocks on the paths from a branch at the end of `block` to its post-dominator, where all
    /// paths meet again. Lanes on different paths are apart in them. For a loop's exit these are
    /// the blocks of the loop.
    pub fn decided_by(&self, block: usize) -> Vec<usize> {
        let meeting = self.after[block];
        let mut found = vec![false; self.exit() + 1];
        let mut next = self.blocks[block].successors.clone();
        while let Some(node) = next.pop() {
            if Some(node) == meeting || node == self.exit() || std::mem::replace(&mut found[node], true) {
                continue;
            }
            next.extend(&self.blocks[node].successors);
        }
        (0..self.exit()).filter(|node| found[*node]).collect()
    }
}

fn ends_block(statement: &Statement) -> bool {
    ["bra", "brx", "ret", "exit", "trap"].iter().any(|name| statement.is(name))
}

/// Immediate post-dominators: the dominators of the reversed graph, by the iteration of Cooper,
/// Harvey and Kennedy.
fn post_dominators(blocks: &[Block]) -> Vec<Option<usize>> {
    let exit = blocks.len();
    let mut before = vec![Vec::new(); exit + 1];
    for (block, Block { successors, .. }) in blocks.iter().enumerate() {
        for successor in successors {
            before[*successor].push(block);
        }
    }
    // Each node comes behind all that it leads to on the way back from the exit, loops aside.
    let mut order = Vec::new();
    let mut seen = vec![false; exit + 1];
    let mut open = vec![(exit, 0)];
    seen[exit] = true;
    while let Some((node, at)) = open.last_mut() {
        if let Some(&next) = before[*node].get(*at) {
            *at += 1;
            if !std::mem::replace(&mut seen[next], true) {
                open.push((next, 0));
            }
        } else {
            order.push(*node);
            open.pop();
        }
    }
    let mut rank = vec![0; exit + 1];
    for (position, node) in order.iter().enumerate() {
        rank[*node] = position;
    }
    let mut after: Vec<Option<usize>> = vec![None; exit + 1];
    after[exit] = Some(exit);
    let mut changed = true;
    while std::mem::take(&mut changed) {
        for &node in order.iter().rev().filter(|node| **node != exit) {
            let mut meeting = None;
            for &successor in &blocks[node].successors {
                if after[successor].is_none() {
                    continue;
                }
                let Some(mut a) = meeting else {
                    meeting = Some(successor);
                    continue;
                };
                let mut b = successor;
                while a != b {
                    if rank[a] < rank[b] {
                        a = after[a].unwrap_or(exit);
                    } else {
                        b = after[b].unwrap_or(exit);
                    }
                }
                meeting = Some(a);
            }
            if after[node] != meeting {
                after[node] = meeting;
                changed = true;
            }
        }
    }
    after.truncate(exit);
    after
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::Module;

    /// The flow of a body, and the block of a label.
    fn flow(body: &str) -> (Flow, impl Fn(&str) -> usize) {
        let mut module = Module::read(&format!(".entry f() {{\n{body}\n}}"));
        let body = module.entries.remove(0).body;
        let flow = Flow::of(&body);
        let starts: HashMap<String, usize> = flow
            .blocks
            .iter()
            .enumerate()
            .filter_map(|(block, it)| Some((body[it.statements.start].label()?.to_owned(), block)))
            .collect();
        (flow, move |label: &str| starts[label])
    }

    #[test]
    fn both_arms_of_a_branch_are_decided_by_it_and_what_follows_is_not() {
        let (flow, at) =
            flow("@%p1 bra A;\nadd.s32 %r1, %r1, 1;\nbra.uni END;\nA:\nadd.s32 %r1, %r1, 2;\nEND:\nret;");
        assert_eq!(flow.blocks.len(), 4);
        assert_eq!(flow.decided_by(0), [1, at("A")]);
        assert!(flow.decided_by(at("A")).is_empty());
        assert_eq!(flow.blocks[at("END")].successors, [flow.exit()]);
    }

    #[test]
    fn the_exit_of_a_loop_decides_about_the_loop() {
        let (flow, at) = flow(
            "LOOP:\nadd.s32 %r1, %r1, 1;\n@%p1 bra BACK;\nbra.uni END;\nBACK:\nbra.uni LOOP;\nEND:\nret;",
        );
        // The block that leaves the loop is where all ways meet again.
        assert_eq!(flow.decided_by(at("LOOP")), [at("LOOP"), at("BACK")]);
    }

    #[test]
    fn a_return_in_one_arm_decides_about_the_rest() {
        let (flow, at) = flow("@%p1 ret;\nadd.s32 %r1, %r1, 1;\nEND:\nret;");
        assert_eq!(flow.decided_by(0), [1, at("END")]);
    }

    #[test]
    fn a_loop_without_an_end_is_decided_by_the_branch_into_it() {
        let (flow, at) = flow("@%p1 bra END;\nLOOP:\nbra.uni LOOP;\nEND:\nret;");
        assert_eq!(flow.decided_by(0), [at("LOOP")]);
        assert_eq!(flow.decided_by(at("LOOP")), [at("LOOP")]);
    }
}
