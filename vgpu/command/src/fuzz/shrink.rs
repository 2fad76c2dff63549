//! Makes a program smaller while it still shows the difference.

use std::collections::BTreeSet;

use super::program::{Program, Step, What};

/// The smallest program found. `shows` runs a program and returns whether it still shows the
/// difference; `None` ends the search.
pub fn smallest(program: &Program, mut shows: impl FnMut(&Program) -> Option<bool>) -> Program {
    let mut best = program.clone();
    loop {
        let before = size(&best.steps);
        let Some(()) = fewer_steps(&mut best, &mut shows) else { return best };
        let Some(()) = plainer(&mut best, &mut shows) else { return best };
        if size(&best.steps) == before {
            return best;
        }
    }
}

/// Steps, and guards, which are steps of their own here.
fn size(steps: &[Step]) -> usize {
    let of = |step: &Step| match &step.what {
        What::Do(one) => 1 + usize::from(one.guard.is_some()),
        What::Branch { arms, .. } => 1 + arms.iter().map(|arm| size(arm)).sum::<usize>(),
        What::Loop { body, .. } => 1 + size(body),
    };
    steps.iter().map(of).sum()
}

/// Leaves out steps: halves of all first, then quarters, at last one by one.
fn fewer_steps(best: &mut Program, shows: &mut impl FnMut(&Program) -> Option<bool>) -> Option<()> {
    let mut part = ids(&best.steps).len().div_ceil(2);
    while part > 0 {
        let all = ids(&best.steps);
        for chunk in all.chunks(part) {
            let out: BTreeSet<usize> = chunk.iter().copied().collect();
            let smaller = Program { steps: without(&best.steps, &out), ..best.clone() };
            if !smaller.steps.is_empty() && size(&smaller.steps) < size(&best.steps) && shows(&smaller)? {
                *best = smaller;
            }
        }
        part = if part == 1 { 0 } else { part.div_ceil(2) };
    }
    Some(())
}

/// Puts steps in place of the branch or loop around them, and drops guards.
fn plainer(best: &mut Program, shows: &mut impl FnMut(&Program) -> Option<bool>) -> Option<()> {
    for id in ids(&best.steps) {
        for way in [Way::Arm(0), Way::Arm(1), Way::Arm(2), Way::Arm(3), Way::All] {
            let steps = opened(&best.steps, id, way);
            let smaller = Program { steps, ..best.clone() };
            if size(&smaller.steps) < size(&best.steps) && shows(&smaller)? {
                *best = smaller;
                break;
            }
        }
    }
    Some(())
}

fn ids(steps: &[Step]) -> Vec<usize> {
    let mut all = vec![];
    for step in steps {
        all.push(step.id);
        match &step.what {
            What::Do(_) => {}
            What::Branch { arms, .. } => all.extend(arms.iter().flat_map(|arm| ids(arm))),
            What::Loop { body, .. } => all.extend(ids(body)),
        }
    }
    all
}

fn without(steps: &[Step], out: &BTreeSet<usize>) -> Vec<Step> {
    let kept = steps.iter().filter(|step| !out.contains(&step.id));
    let inside = kept.map(|step| {
        let what = match &step.what {
            What::Do(one) => What::Do(one.clone()),
            What::Branch { on, arms } => {
                What::Branch { on: *on, arms: arms.iter().map(|arm| without(arm, out)).collect() }
            }
            What::Loop { turns, body } => What::Loop { turns: *turns, body: without(body, out) },
        };
        Step { id: step.id, what }
    });
    inside.collect()
}

/// The steps of a branch that stay.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// The steps of one arm.
    Arm(usize),
    /// The steps of all arms, one arm behind the other.
    All,
}

fn opened(steps: &[Step], id: usize, way: Way) -> Vec<Step> {
    let mut all = vec![];
    for step in steps {
        let here = step.id == id;
        let what = match &step.what {
            What::Do(one) if here => What::Do(super::program::Use { guard: None, ..one.clone() }),
            What::Branch { arms, .. } if here => {
                let stays = |arm: usize| way == Way::All || way == Way::Arm(arm);
                let stay = arms.iter().enumerate().filter(|(arm, _)| stays(*arm));
                all.extend(stay.flat_map(|(_, steps)| steps.iter().cloned()));
                continue;
            }
            What::Loop { body, .. } if here => {
                all.extend(body.iter().cloned());
                continue;
            }
            What::Do(one) => What::Do(one.clone()),
            What::Branch { on, arms } => {
                What::Branch { on: *on, arms: arms.iter().map(|arm| opened(arm, id, way)).collect() }
            }
            What::Loop { turns, body } => What::Loop { turns: *turns, body: opened(body, id, way) },
        };
        all.push(Step { id: step.id, what });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::program::{Dealer, Style};
    use super::*;

    #[test]
    fn what_is_left_is_what_shows() {
        let forms = super::super::all_forms();
        for number in 0..20 {
            let program = Dealer::new(&forms, 3).program(number, Style::Traced);
            let uses: Vec<usize> = program.uses().iter().map(|(id, _)| *id).collect();
            let (first, last) = (uses[uses.len() / 3], uses[uses.len() / 2]);
            let has = |program: &Program, id| program.uses().iter().any(|(other, _)| *other == id);
            let small = smallest(&program, |program| Some(has(program, first) && has(program, last)));
            let left: Vec<usize> = small.uses().iter().map(|(id, _)| *id).collect();
            let both: BTreeSet<usize> = [first, last].into();
            assert_eq!(left, both.into_iter().collect::<Vec<_>>(), "program {number}");
            assert_eq!(ids(&small.steps), left, "program {number}: branches and loops are gone");
        }
    }

    #[test]
    fn a_search_that_ends_early_keeps_the_best() {
        let forms = super::super::all_forms();
        let program = Dealer::new(&forms, 3).program(1, Style::Chained);
        let mut left = 3;
        let small = smallest(&program, |_| {
            left -= 1;
            (left > 0).then_some(true)
        });
        assert!(size(&small.steps) < size(&program.steps));
    }
}
