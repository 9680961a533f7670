//! The partitions that a replica owns.

use std::fmt;

use construct_domain::{TaskId, partition};

// One bit per partition.
const _: () = assert!(partition::COUNT <= 64);

/// A set of partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PartitionAssignment(u64);

impl PartitionAssignment {
    pub(crate) const EMPTY: Self = Self(0);

    #[cfg(test)]
    pub(crate) fn all() -> Self {
        (0..partition::COUNT).collect()
    }

    pub(crate) const fn contains(self, partition: u16) -> bool {
        self.0 >> partition & 1 == 1
    }

    pub(crate) fn contains_task(self, task: TaskId) -> bool {
        self.contains(partition::for_task(task))
    }

    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) const fn difference(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(crate) const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) fn partitions(self) -> impl Iterator<Item = u16> {
        (0..partition::COUNT).filter(move |&partition| self.contains(partition))
    }
}

impl FromIterator<u16> for PartitionAssignment {
    fn from_iter<I: IntoIterator<Item = u16>>(partitions: I) -> Self {
        Self(partitions.into_iter().fold(0, |bits, partition| bits | 1 << partition))
    }
}

/// As in subjects, two digits each.
impl fmt::Display for PartitionAssignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, partition) in self.partitions().enumerate() {
            let gap = if n > 0 { " " } else { "" };
            write!(f, "{gap}{partition:02}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_lists_gained_and_lost_partitions() {
        let (old, new): (PartitionAssignment, PartitionAssignment) =
            ([0, 3, 7].into_iter().collect(), [3, 15].into_iter().collect());
        assert_eq!(new.difference(old).to_string(), "15");
        assert_eq!(old.difference(new).to_string(), "00 07");
        assert_eq!(old.union(new).to_string(), "00 03 07 15");
        assert_eq!(old.intersection(new).to_string(), "03");
        assert_eq!(
            PartitionAssignment::all().difference(PartitionAssignment::all()),
            PartitionAssignment::EMPTY
        );
        assert!(PartitionAssignment::EMPTY.is_empty() && !new.is_empty());
    }
}
