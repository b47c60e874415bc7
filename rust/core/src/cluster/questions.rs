//! Values that are asked for, and which of the questions are answered.
//!
//! ```text
//!   wanted     a b c d  e f g h  i j k l  m …
//!   asked      MGET a b c d   MGET e f g h ──►   ◄── answered: a b
//!                                                when few are left: MGET i j k l
//! ```
//!
//! Short values are asked for several at once, which takes the server less time for each. Whoever may not do that, or
//! asks for what several servers have, gets an error for all of them; then each is asked for by itself.

use super::connection::Connection;
use std::collections::VecDeque;
use std::ops::Range;

/// So many short values are asked for at once.
pub(super) const TOGETHER: usize = 16;

/// A sample that is wanted.
#[derive(Clone)]
pub(super) struct Wanted {
    /// Its position among all that are.
    pub(super) which: usize,
    /// Of its value.
    pub(super) name: Vec<u8>,
    /// Another server sent us, for this time: its slot is on its way here.
    pub(super) asking: bool,
}

/// One question, and for which of what is wanted.
pub(super) enum Question {
    One(usize),
    Some(Range<usize>),
}

/// What was asked for of what is wanted.
pub(super) struct Questions<'w> {
    pub(super) wanted: &'w [Wanted],
    /// So many are asked for at once.
    together: usize,
    /// How many were asked for, and how many answers are to come.
    asked: usize,
    open: usize,
    /// In the order of the answers.
    unanswered: VecDeque<Question>,
}

impl<'w> Questions<'w> {
    pub(super) fn new(wanted: &'w [Wanted], together: usize) -> Self {
        Self { wanted, together, asked: 0, open: 0, unanswered: VecDeque::new() }
    }

    /// Asks for the next ones, so that answers to so many are to come.
    pub(super) fn ask_more(&mut self, connection: &mut Connection, window: usize) {
        while self.asked < self.wanted.len() && self.open < window {
            let left = self.wanted.len() - self.asked;
            let count = self.together.min(left).min(window - self.open);
            let next = self.asked..self.asked + count;
            self.asked = next.end;
            self.ask(connection, next);
        }
    }

    /// The same once half of the answers have come; whether it did.
    pub(super) fn ask_more_if_few(&mut self, connection: &mut Connection, window: usize) -> bool {
        let few = self.asked < self.wanted.len() && self.open <= window / 2;
        if few {
            self.ask_more(connection, window);
        }
        few
    }

    /// Asks for each of these by itself: together they are not answered.
    pub(super) fn ask_again(&mut self, connection: &mut Connection, which: Range<usize>) {
        self.together = 1;
        self.open -= which.len();
        which.for_each(|at| self.ask(connection, at..at + 1));
    }

    fn ask(&mut self, connection: &mut Connection, which: Range<usize>) {
        self.open += which.len();
        if which.len() > 1 {
            connection.begin(1 + which.len());
            connection.word(&[b"MGET"]);
            self.wanted[which.clone()].iter().for_each(|one| connection.word(&[&one.name]));
            self.unanswered.push_back(Question::Some(which));
            return;
        }
        for at in which {
            if self.wanted[at].asking {
                connection.queue(&[b"ASKING"]);
            }
            connection.queue(&[b"GET", &self.wanted[at].name]);
            self.unanswered.push_back(Question::One(at));
        }
    }

    /// The question that is answered next.
    pub(super) fn next(&mut self) -> Option<Question> {
        self.unanswered.pop_front()
    }

    /// One of the answers has come.
    pub(super) fn is_answered(&mut self) {
        self.open -= 1;
    }
}
