//! A pattern as a table of states over classes of characters: one lookup for each character, and no
//! backtracking.
//!
//! A state is the ordered list of the places in the pattern where a backtracking matcher could be
//! after the same characters, the one that it would try first in front. A place that ends a match
//! therefore drops all behind it, and the last end that is reached before no place is left is the
//! end that backtracking finds. A lookahead is decided by the class of the next character, with
//! which each transition begins.

use std::collections::HashMap;

use super::char_classes::{CharClasses, ClassMask};
use super::pattern::{Node, Presence};

/// Bounds the time and memory of loading.
const STATES_MAX: usize = 512;

/// The row of the state without places.
const DEAD: u32 = 0;

#[derive(Debug)]
pub(super) struct WordAutomaton {
    /// Rows of transitions, one for each state; the second row is the start.
    steps: Vec<PatternStep>,
    /// Length of a row.
    stride: u32,
    /// The class that stands for the text's end.
    end_class: u8,
}

/// The transition of a state by the class of the next character.
#[derive(Clone, Copy, Debug)]
struct PatternStep {
    /// Where the next state's row begins.
    row: u32,
    /// Whether a match ends before the character.
    ends_match: bool,
}

/// What an attempt to match found.
#[derive(Clone, Copy, Debug)]
pub(super) struct PatternMatch {
    /// The end of the match, which is above its start.
    pub end: Option<usize>,
    /// The end of the text that was looked at, at or behind the match's.
    pub seen: usize,
}

/// A place in a pattern.
#[derive(Clone, Debug)]
enum PatternPlace {
    Take {
        set: ClassMask,
        next: u16,
    },
    NotAhead {
        set: ClassMask,
        next: u16,
    },
    /// In the order of trying.
    Choice(Vec<u16>),
    Match,
}

#[derive(Default)]
struct PatternPlaces(Vec<PatternPlace>);

/// One transition while it is found.
struct PlaceWalk<'p> {
    places: &'p [PatternPlace],
    /// The class of the next character, one bit; none at the text's end.
    class: ClassMask,
    visited: Vec<bool>,
    /// The places after the character.
    next: Vec<u16>,
    ends_match: bool,
}

impl WordAutomaton {
    /// `None`: a pattern that needs too many states, or that may match an empty text.
    pub(super) fn new(
        alternatives: &[Vec<Node<ClassMask>>],
        classes: &CharClasses,
    ) -> Option<Self> {
        let mut places = PatternPlaces::default();
        let end = places.add(PatternPlace::Match)?;
        let start = places.choice(alternatives, end, Presence::Required)?;
        let end_class = classes.all().count_ones();
        let stride = end_class + 1;
        let mut states = vec![Vec::new(), vec![start]];
        let mut number_of: HashMap<Vec<u16>, u32> = HashMap::new();
        number_of.extend(
            (0..)
                .zip(&states)
                .map(|(number, state)| (state.clone(), number)),
        );
        let mut steps = Vec::new();
        let mut number = 0;
        while let Some(state) = states.get(number).cloned() {
            for class in 0..stride {
                let bit = if class < end_class { 1 << class } else { 0 };
                let mut walk = PlaceWalk::new(&places.0, bit);
                state.iter().for_each(|place| walk.visit(*place));
                if walk.ends_match && state == [start] {
                    return None;
                }
                let new = u32::try_from(states.len()).ok()?;
                let next = *number_of.entry(walk.next.clone()).or_insert(new);
                if next == new {
                    states.push(walk.next);
                }
                steps.push(PatternStep {
                    row: next * stride,
                    ends_match: walk.ends_match,
                });
            }
            number += 1;
            if states.len() > STATES_MAX {
                return None;
            }
        }
        Some(Self {
            steps,
            stride,
            end_class: u8::try_from(end_class).ok()?,
        })
    }

    #[inline]
    pub(super) fn match_at(&self, classes: &CharClasses, text: &[u8], from: usize) -> PatternMatch {
        let (mut row, mut end, mut at) = (self.stride, None, from);
        while row != DEAD {
            let (class, length) = classes.at(text, at).unwrap_or((self.end_class, 0));
            let step = self.steps[row as usize + usize::from(class)];
            if step.ends_match {
                end = Some(at);
            }
            row = step.row;
            at += length;
        }
        #[cfg(test)]
        tests::SEEN_BYTES.set(tests::SEEN_BYTES.get() + at - from);
        PatternMatch { end, seen: at }
    }
}

impl PatternPlaces {
    fn add(&mut self, place: PatternPlace) -> Option<u16> {
        self.0.push(place);
        (self.0.len() <= STATES_MAX).then_some((self.0.len() - 1) as u16)
    }

    /// The place where nodes begin that `next` follows.
    fn sequence(&mut self, nodes: &[Node<ClassMask>], mut next: u16) -> Option<u16> {
        for node in nodes.iter().rev() {
            next = match node {
                Node::Repeat { set, min, max } => self.repeat(*set, *min, *max, next)?,
                Node::NotAhead(set) => self.add(PatternPlace::NotAhead { set: *set, next })?,
                Node::Group {
                    alternatives,
                    presence,
                } => self.choice(alternatives, next, *presence)?,
            };
        }
        Some(next)
    }

    /// Greedy: another character is tried before what follows.
    fn repeat(&mut self, set: ClassMask, min: u32, max: u32, next: u16) -> Option<u16> {
        let mut first = next;
        if max == u32::MAX {
            first = self.add(PatternPlace::Choice(Vec::new()))?;
            let take = self.add(PatternPlace::Take { set, next: first })?;
            self.0[usize::from(first)] = PatternPlace::Choice(vec![take, next]);
        } else {
            for _ in min..max {
                let take = self.add(PatternPlace::Take { set, next: first })?;
                first = self.add(PatternPlace::Choice(vec![take, next]))?;
            }
        }
        for _ in 0..min {
            first = self.add(PatternPlace::Take { set, next: first })?;
        }
        Some(first)
    }

    fn choice(
        &mut self,
        alternatives: &[Vec<Node<ClassMask>>],
        next: u16,
        presence: Presence,
    ) -> Option<u16> {
        let begin = alternatives.iter().map(|nodes| self.sequence(nodes, next));
        let mut tried: Vec<u16> = begin.collect::<Option<_>>()?;
        tried.extend((presence == Presence::Optional).then_some(next));
        self.add(PatternPlace::Choice(tried))
    }
}

impl<'p> PlaceWalk<'p> {
    fn new(places: &'p [PatternPlace], class: ClassMask) -> Self {
        Self {
            places,
            class,
            visited: vec![false; places.len()],
            next: Vec::new(),
            ends_match: false,
        }
    }

    /// Visits what a place leads to without a character. A second visit of a place can only find
    /// what is tried earlier already.
    fn visit(&mut self, place: u16) {
        let is_known = std::mem::replace(&mut self.visited[usize::from(place)], true);
        if is_known || self.ends_match {
            return;
        }
        match &self.places[usize::from(place)] {
            PatternPlace::Take { set, next } if set & self.class != 0 => {
                if !self.next.contains(next) {
                    self.next.push(*next);
                }
            }
            PatternPlace::NotAhead { set, next } if set & self.class == 0 => self.visit(*next),
            PatternPlace::Choice(tried) => tried.iter().for_each(|place| self.visit(*place)),
            PatternPlace::Match => self.ends_match = true,
            PatternPlace::Take { .. } | PatternPlace::NotAhead { .. } => {}
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
