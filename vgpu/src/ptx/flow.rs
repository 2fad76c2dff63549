//! Control flow graphs of code that is a list: the statements of a body, or lowered instructions.

use std::collections::HashMap;
use std::ops::Range;

use super::{Operand, Stmt};

/// Where control goes behind one element of the code.
#[derive(Debug, Default)]
pub(crate) struct Leave {
    /// Elements that it may jump to.
    pub(crate) targets: Vec<usize>,
    /// Whether it may end the code.
    pub(crate) exits: bool,
    /// Whether control may go on to the next element.
    pub(crate) continues: bool,
}

/// The basic blocks, in the order of the code, and where control continues behind each. The first
/// one is the entry.
#[derive(Debug)]
pub struct Flow {
    /// The elements of each block.
    pub blocks: Vec<Range<usize>>,
    /// The blocks that may follow each.
    pub successors: Vec<Vec<usize>>,
    /// The blocks behind which the code may end.
    pub exits: Vec<bool>,
}

impl Flow {
    /// `leave` is `None` for an element that always continues with the next one.
    pub(crate) fn new(len: usize, leave: impl Fn(usize) -> Option<Leave>) -> Self {
        let mut leader = vec![false; len + 1];
        leader[0] = true;
        for (i, leave) in (0..len).filter_map(|i| Some((i, leave(i)?))) {
            leader[i + 1] = true;
            leave.targets.into_iter().for_each(|target| leader[target] = true);
        }
        let starts: Vec<usize> = (0..len).filter(|&i| leader[i]).collect();
        let ends = starts.iter().skip(1).copied().chain([len]);
        let blocks: Vec<Range<usize>> = starts.iter().zip(ends).map(|(&start, end)| start..end).collect();
        let block_of = |i: usize| starts.partition_point(|&s| s <= i) - 1;
        let (mut successors, mut exits) = (vec![], vec![]);
        for block in &blocks {
            let next = || Leave { continues: true, ..Leave::default() };
            let leave = leave(block.end - 1).unwrap_or_else(next);
            let mut to: Vec<usize> = leave.targets.into_iter().map(block_of).collect();
            // Tables mostly name some labels many times.
            to.sort_unstable();
            to.dedup();
            let at_the_end = leave.continues && block.end == len;
            if leave.continues && !at_the_end {
                to.push(block_of(block.end));
            }
            successors.push(to);
            exits.push(leave.exits || at_the_end);
        }
        Flow { blocks, successors, exits }
    }

    /// The control flow of a body. A branch to a label that does not exist ends it; an indexed
    /// branch leads to all labels of its table.
    #[must_use]
    pub fn of(body: &[Stmt]) -> Self {
        let scopes = Scopes::of(body);
        let (mut labels, mut tables) = (HashMap::new(), HashMap::new());
        for (i, (stmt, &scope)) in body.iter().zip(&scopes.at).enumerate() {
            if let Stmt::Label { name, .. } = stmt {
                labels.insert((scope, name.as_str()), i);
            } else if let Stmt::Targets { name, labels, .. } = stmt {
                tables.insert((scope, name.as_str()), labels);
            }
        }
        Flow::new(body.len(), |i| {
            let Stmt::Inst(inst) = &body[i] else { return None };
            let label = |name: &str| scopes.find(i, name, &labels).copied();
            let last = inst.operands.last().map(|(operand, _)| operand);
            let targets: Vec<Option<usize>> = match (last, inst.base()) {
                (Some(Operand::Name(name)), "bra") => vec![label(name)],
                (Some(Operand::Name(name)), "brx") => {
                    let table = scopes.find(i, name, &tables).into_iter().copied().flatten();
                    table.map(|(name, _)| label(name)).collect()
                }
                (_, "ret" | "exit" | "trap" | "bra" | "brx") => vec![],
                _ => return None,
            };
            let exits = targets.is_empty() || targets.contains(&None);
            Some(Leave {
                exits,
                continues: inst.guard.is_some(),
                targets: targets.into_iter().flatten().collect(),
            })
        })
    }

    /// The nearest block on every path from each block to the end of the code, itself aside. Code
    /// ends in a node behind all blocks, whose number is that of the blocks. `None` if no path from
    /// a block ends.
    ///
    /// These are the immediate dominators of the reversed graph, by the iteration of Cooper, Harvey
    /// and Kennedy.
    #[must_use]
    pub fn post_dominators(&self) -> Vec<Option<usize>> {
        let exit = self.blocks.len();
        let after =
            |node: usize| self.successors[node].iter().copied().chain(self.exits[node].then_some(exit));
        let mut before = vec![vec![]; exit + 1];
        (0..exit).for_each(|node| after(node).for_each(|next| before[next].push(node)));
        // Each node comes behind all that it leads to on the way back from the exit, loops aside.
        let (mut order, mut rank) = (vec![], vec![0; exit + 1]);
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
                rank[*node] = order.len();
                order.push(*node);
                open.pop();
            }
        }
        let mut meeting: Vec<Option<usize>> = vec![None; exit + 1];
        meeting[exit] = Some(exit);
        let mut changed = true;
        while std::mem::take(&mut changed) {
            for &node in order.iter().rev().filter(|&&node| node != exit) {
                let known = after(node).filter(|&next| meeting[next].is_some());
                let common = known.reduce(|mut a, mut b| {
                    while a != b {
                        let later = if rank[a] < rank[b] { &mut a } else { &mut b };
                        *later = meeting[*later].unwrap_or(exit);
                    }
                    a
                });
                changed |= meeting[node] != common;
                meeting[node] = common;
            }
        }
        meeting.truncate(exit);
        meeting
    }

    /// The blocks on the paths from the branch at the end of `block` to `meeting`, its
    /// post-dominator, where all paths meet again. Lanes on different paths are apart in them. For
    /// a loop's exit these are the blocks of the loop.
    #[must_use]
    pub fn decided_by(&self, block: usize, meeting: Option<usize>) -> Vec<usize> {
        let mut found = vec![false; self.blocks.len()];
        let mut next = self.successors[block].clone();
        while let Some(node) = next.pop() {
            if Some(node) != meeting && !std::mem::replace(&mut found[node], true) {
                next.extend(&self.successors[node]);
            }
        }
        (0..found.len()).filter(|&node| found[node]).collect()
    }
}

/// The scopes of a body: what `{` and `}` enclose. A name means what the innermost scope around it
/// declares.
#[derive(Debug)]
pub struct Scopes {
    /// The scope of each statement; the body's own is 0.
    pub at: Vec<usize>,
    /// The scope around each scope.
    parents: Vec<usize>,
}

impl Scopes {
    /// The scopes of a body.
    #[must_use]
    pub fn of(body: &[Stmt]) -> Self {
        let (mut scopes, mut now) = (Scopes { at: vec![], parents: vec![0] }, 0);
        for stmt in body {
            match stmt {
                Stmt::Open => {
                    scopes.parents.push(now);
                    now = scopes.parents.len() - 1;
                }
                Stmt::Close => now = scopes.parents[now],
                _ => {}
            }
            scopes.at.push(now);
        }
        scopes
    }

    /// The declaration that a name refers to at a statement. `declared` has scopes and names.
    #[must_use]
    pub fn find<'a, T>(
        &self,
        statement: usize,
        name: &'a str,
        declared: &'a HashMap<(usize, &'a str), T>,
    ) -> Option<&'a T> {
        let mut scope = self.at[statement];
        loop {
            match declared.get(&(scope, name)) {
                None if scope != 0 => scope = self.parents[scope],
                found => return found,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::parse;

    /// The flow of a body, the block of a label, and what the branch of a block decides about.
    fn flow(body: &str) -> (Flow, impl Fn(&str) -> usize, impl Fn(usize) -> Vec<usize>) {
        let file = parse(&format!(".version 8.4\n.target sm_90\n.entry f() {{\n{body}\n}}")).unwrap();
        let body = file.entries[0].body.clone();
        let [flow, other] = [0; 2].map(|_| Flow::of(&body));
        let labels: HashMap<String, usize> = (flow.blocks.iter().enumerate())
            .filter_map(|(block, it)| match &body[it.start] {
                Stmt::Label { name, .. } => Some((name.clone(), block)),
                _ => None,
            })
            .collect();
        let meetings = other.post_dominators();
        (flow, move |label: &str| labels[label], move |block| other.decided_by(block, meetings[block]))
    }

    #[test]
    fn both_arms_of_a_branch_are_decided_by_it_and_what_follows_is_not() {
        let (flow, at, decided_by) =
            flow("@%p1 bra A;\nadd.s32 %r1, %r1, 1;\nbra.uni END;\nA:\nadd.s32 %r1, %r1, 2;\nEND:\nret;");
        assert_eq!(flow.blocks.len(), 4);
        assert_eq!(decided_by(0), [1, at("A")]);
        assert!(decided_by(at("A")).is_empty());
        assert_eq!(flow.exits, [false, false, false, true]);
    }

    #[test]
    fn the_exit_of_a_loop_decides_about_the_loop() {
        let (_, at, decided_by) = flow(
            "LOOP:\nadd.s32 %r1, %r1, 1;\n@%p1 bra BACK;\nbra.uni END;\nBACK:\nbra.uni LOOP;\nEND:\nret;",
        );
        // All paths meet again in the block that leaves the loop.
        assert_eq!(decided_by(at("LOOP")), [at("LOOP"), at("BACK")]);
    }

    #[test]
    fn a_return_in_one_arm_decides_about_the_rest() {
        let (flow, _, decided_by) = flow("@%p1 ret;\nadd.s32 %r1, %r1, 1;\nbra END;\nEND:\nret;");
        assert_eq!(decided_by(0), [1, 2]);
        assert_eq!(flow.successors, [vec![1], vec![2], vec![]]);
    }

    #[test]
    fn a_loop_without_an_end_is_decided_by_the_branch_into_it() {
        let (_, at, decided_by) = flow("@%p1 bra END;\nLOOP:\nbra.uni LOOP;\nEND:\nret;");
        assert_eq!(decided_by(0), [at("LOOP")]);
        assert_eq!(decided_by(at("LOOP")), [at("LOOP")]);
    }

    #[test]
    fn labels_belong_to_their_scopes_and_tables_list_labels() {
        let (flow, ..) = flow(
            "{ L: @%p1 bra L; }\n{ L: @%p2 bra L; }\nT: .branchtargets A, B;\nbrx.idx %r1, T;\nA: ret; B: ret;",
        );
        let loops: Vec<usize> = (0..flow.blocks.len()).filter(|&b| flow.successors[b].contains(&b)).collect();
        assert_eq!(loops.len(), 2);
        let of_the_table = flow.successors.iter().filter(|to| to.len() == 2).count();
        assert_eq!(of_the_table, 3, "two loops and the table");
    }
}
