//! Which of a fixed number of partitions a task belongs to, and which of several processes a
//! partition.

use crate::TaskId;

/// How many partitions there are. Part of every task's subjects: changing it strands the commands
/// in flight. More would be of use to more than sixteen reconcilers only; each costs a consumer
/// that waits at the server.
pub const COUNT: u16 = 16;

/// The partition of a task. UUIDv7 ids begin with the time, so only their random tail is taken.
pub fn of(task: TaskId) -> u16 {
    let tail = (task.uuid().as_u128() & u128::from(u64::MAX)) as u64;
    // Fibonacci hashing: spreads ids that a test counts up as well as random ones.
    let mixed = tail.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
    (mixed % u64::from(COUNT)) as u16
}

/// The owner of each partition among `members`, by rendezvous hashing: the one with the highest
/// weight for it that has not its fair share already. Whoever knows the same members comes to the
/// same answer, in whatever order they are named. Empty when there are none.
///
/// The bound (the number of partitions by that of the members, rounded up) keeps the shares even,
/// which sixteen partitions alone would not be; for it, a few partitions more than necessary change
/// hands when a member comes or goes.
pub fn owners<'a>(members: &[&'a str]) -> Vec<&'a str> {
    let mut members = members.to_vec();
    members.sort_unstable();
    members.dedup();
    let share = usize::from(COUNT).div_ceil(members.len().max(1));
    let mut taken = vec![0_usize; members.len()];
    let owner = |partition| {
        let free = (0..members.len()).filter(|&member| taken[member] < share);
        let owner = free.max_by_key(|&member| weight(members[member], partition))?;
        taken[owner] += 1;
        Some(members[owner])
    };
    (0..COUNT).filter_map(owner).collect()
}

/// How much a member is for a partition: any fixed function that mixes well. It is part of what
/// processes of different versions must agree about.
fn weight(member: &str, partition: u16) -> u64 {
    // FNV-1a, and the finalizer of MurmurHash3, because FNV alone hardly mixes its last bytes.
    let bytes = member.bytes().chain(partition.to_be_bytes());
    let hash = bytes.fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    });
    let mixed = (hash ^ (hash >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    let mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    mixed ^ (mixed >> 33)
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

    fn names(count: usize) -> Vec<String> {
        (0..count).map(|n| format!("reconciler-{n:08x}")).collect()
    }

    fn owners_of(names: &[String]) -> Vec<&str> {
        owners(&names.iter().map(String::as_str).collect::<Vec<_>>())
    }

    #[test]
    fn every_partition_has_one_owner_and_nobody_more_than_a_fair_share() {
        assert_eq!(owners(&[]), Vec::<&str>::new());
        for count in 1..40 {
            let names = names(count);
            let owners = owners_of(&names);
            assert_eq!(owners.len(), usize::from(COUNT));
            let most =
                names.iter().map(|name| owners.iter().filter(|owner| *owner == name).count()).max();
            assert!(
                most.is_some_and(|most| most <= usize::from(COUNT).div_ceil(count)),
                "{owners:?}"
            );
        }
    }

    #[test]
    fn the_order_in_which_members_are_known_does_not_matter() {
        let mut names = names(5);
        let owners: Vec<String> = owners_of(&names).into_iter().map(str::to_owned).collect();
        names.reverse();
        names.push(names[2].clone());
        assert_eq!(owners_of(&names), owners);
    }

    #[test]
    fn when_a_member_goes_most_of_what_the_others_have_stays_with_them() {
        let (mut moved, mut kept) = (0, 0);
        for count in 2..9 {
            let all = names(count);
            let before = owners_of(&all);
            for gone in 0..count {
                let rest: Vec<String> =
                    all.iter().filter(|name| **name != all[gone]).cloned().collect();
                for (before, after) in before.iter().zip(owners_of(&rest)) {
                    match *before == all[gone] {
                        true => {}
                        false if *before == after => kept += 1,
                        false => moved += 1,
                    }
                }
            }
        }
        assert!(moved * 4 < kept, "{moved} moved without need, {kept} stayed");
    }
}
