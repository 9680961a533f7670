//! Which of a fixed number of partitions a task belongs to.

use crate::TaskId;

/// How many partitions there are. Part of every task's subjects: changing it strands the commands in flight.
pub const COUNT: u16 = 16;

/// The partition of a task. UUIDv7 ids begin with the time, so only their random tail is taken.
pub fn of(task: TaskId) -> u16 {
    let tail = (task.uuid().as_u128() & u128::from(u64::MAX)) as u64;
    // Fibonacci hashing: spreads ids that a test counts up as well as random ones.
    let mixed = tail.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
    (mixed % u64::from(COUNT)) as u16
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn tasks_spread_over_all_partitions() {
        let mut seen = [0_u32; COUNT as usize];
        for n in 0..1600 {
            seen[usize::from(of(TaskId::from_uuid(Uuid::from_u128(n))))] += 1;
        }
        assert!(seen.iter().all(|&count| (50..200).contains(&count)), "{seen:?}");
    }
}
