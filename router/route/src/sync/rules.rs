//! Rules that a test can break, to see that breaking them is found. Outside tests all are kept.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Nothing of a former incarnation is applied.
    Fence,
    /// Digests at equal numbers are compared.
    Digest,
    /// What one said oneself is left aside when it comes back.
    OwnAside,
    /// Nobody is dead at the first silence.
    Patience,
    /// Nobody is dead to the deaf.
    LoopbackMonitor,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rules {
    #[cfg(test)]
    pub(super) broken: Option<Rule>,
}

impl Rules {
    #[cfg(not(test))]
    #[expect(clippy::unused_self, reason = "a test's rules are values")]
    pub(super) const fn keep(self, _: Rule) -> bool {
        true
    }

    #[cfg(test)]
    pub(super) fn keep(self, rule: Rule) -> bool {
        self.broken != Some(rule)
    }
}
