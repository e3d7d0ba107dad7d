//! Ordered list of slot numbers; finding, removing and inserting any slot is O(1).
//!
//! Doubly linked through an array as long as the pool, so it never allocates after construction. A
//! slot is in the list at most once.

/// No neighbour.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Links {
    before: u32,
    after: u32,
    listed: bool,
}

pub(super) struct SlotList {
    links: Vec<Links>,
    front: u32,
    back: u32,
    len: usize,
}

impl SlotList {
    /// An empty list that can hold the slots `0..slots`.
    pub(super) fn new(slots: usize) -> Self {
        let unlisted = Links {
            before: NONE,
            after: NONE,
            listed: false,
        };
        Self {
            links: vec![unlisted; slots],
            front: NONE,
            back: NONE,
            len: 0,
        }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) fn push_back(&mut self, slot: u32) {
        self.insert_between(self.back, slot, NONE);
    }

    pub(super) fn push_front(&mut self, slot: u32) {
        self.insert_between(NONE, slot, self.front);
    }

    pub(super) fn pop_front(&mut self) -> Option<u32> {
        let slot = self.front;
        if slot == NONE {
            return None;
        }
        self.remove(slot);
        Some(slot)
    }

    pub(super) fn remove(&mut self, slot: u32) {
        let links = self.links[slot as usize];
        assert!(links.listed, "slot {slot} is not in the list");
        match links.before {
            NONE => self.front = links.after,
            before => self.links[before as usize].after = links.after,
        }
        match links.after {
            NONE => self.back = links.before,
            after => self.links[after as usize].before = links.before,
        }
        self.links[slot as usize].listed = false;
        self.len -= 1;
    }

    /// From front to back.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        let mut next = self.front;
        std::iter::from_fn(move || {
            let slot = next;
            if slot == NONE {
                return None;
            }
            next = self.links[slot as usize].after;
            Some(slot)
        })
    }

    fn insert_between(&mut self, before: u32, slot: u32, after: u32) {
        let links = &mut self.links[slot as usize];
        assert!(!links.listed, "slot {slot} is already in the list");
        *links = Links {
            before,
            after,
            listed: true,
        };
        match before {
            NONE => self.front = slot,
            before => self.links[before as usize].after = slot,
        }
        match after {
            NONE => self.back = slot,
            after => self.links[after as usize].before = slot,
        }
        self.len += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    const SLOTS: u32 = 8;

    proptest! {
        #[test]
        fn behaves_like_a_deque(operations in prop::collection::vec((0..4_u8, 0..SLOTS), 0..200)) {
            let mut list = SlotList::new(SLOTS as usize);
            let mut model = VecDeque::new();
            for (operation, slot) in operations {
                let listed = model.iter().position(|&held| held == slot);
                match (operation, listed) {
                    (0, None) => {
                        list.push_back(slot);
                        model.push_back(slot);
                    }
                    (1, None) => {
                        list.push_front(slot);
                        model.push_front(slot);
                    }
                    (2, Some(at)) => {
                        list.remove(slot);
                        model.remove(at);
                    }
                    (3, _) => prop_assert_eq!(list.pop_front(), model.pop_front()),
                    _ => {}
                }
                prop_assert_eq!(list.len(), model.len());
                prop_assert!(list.iter().eq(model.iter().copied()));
            }
        }
    }
}
