//! The panic hook's record of a rank's panic: place and backtrace.

use std::backtrace::Backtrace;
use std::cell::RefCell;
use std::sync::Once;

/// Where a rank panicked.
pub(super) struct Panic {
    /// File, line and column.
    pub place: String,
    pub backtrace: String,
}

enum State {
    /// This thread is no rank.
    Off,
    /// It is one, and has not panicked.
    Armed,
    Panicked(Panic),
}

thread_local! {
    static STATE: RefCell<State> = const { RefCell::new(State::Off) };
}

/// From now on this thread's panics are noted, not printed.
pub(super) fn arm() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let noted = STATE.try_with(|state| {
                // Borrowed where this very code panics.
                let Ok(mut state) = state.try_borrow_mut() else { return false };
                if !matches!(*state, State::Armed) {
                    return false;
                }
                let place = info.location().map_or_else(String::new, ToString::to_string);
                *state = State::Panicked(Panic { place, backtrace: Backtrace::force_capture().to_string() });
                true
            });
            if !noted.unwrap_or(false) {
                before(info);
            }
        }));
    });
    STATE.set(State::Armed);
}

/// The panic since [`arm`].
pub(super) fn disarm() -> Option<Panic> {
    match STATE.replace(State::Off) {
        State::Panicked(panic) => Some(panic),
        State::Off | State::Armed => None,
    }
}
