//! Maps tasks to a fixed number of partitions, and partitions to the processes that own them.

use crate::TaskId;

/// The number of partitions. It is part of every task's subjects, so changing it strands the
/// commands in flight. More partitions would only help more than sixteen reconcilers, and each
/// costs a consumer that waits at the server.
pub const COUNT: u16 = 16;

/// The partition of a task. UUIDv7 ids begin with the time, so only their random tail is hashed.
pub fn for_task(task: TaskId) -> u16 {
    let tail = (task.uuid().as_u128() & u128::from(u64::MAX)) as u64;
    // Fibonacci hashing spreads sequential ids (as in tests) as well as random ones.
    let mixed = tail.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
    (mixed % u64::from(COUNT)) as u16
}

/// The owner of each partition among `members`. Empty when there are no members.
///
/// Rendezvous hashing: a partition goes to the member with the highest weight for it that still has
/// capacity. Processes that know the same members compute the same owners, in any order of
/// `members`.
///
/// Each member owns at most the number of partitions divided by the number of members, rounded up.
/// Without this bound, sixteen partitions would be spread unevenly. The price is that a few more
/// partitions than necessary move when a member joins or leaves.
pub fn owners<'a>(members: &[&'a str]) -> Vec<&'a str> {
    let mut members = members.to_vec();
    members.sort_unstable();
    members.dedup();
    let capacity = usize::from(COUNT).div_ceil(members.len().max(1));
    let mut owned = vec![0_usize; members.len()];
    let owner = |partition| {
        let free = (0..members.len()).filter(|&member| owned[member] < capacity);
        let owner = free.max_by_key(|&member| weight(members[member], partition))?;
        owned[owner] += 1;
        Some(members[owner])
    };
    (0..COUNT).filter_map(owner).collect()
}

/// The weight of a member for a partition. Any fixed function that mixes well would do, but
/// processes of different versions must agree on it.
fn weight(member: &str, partition: u16) -> u64 {
    // FNV-1a with the finalizer of MurmurHash3, because FNV alone hardly mixes its last bytes.
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
            seen[usize::from(for_task(TaskId::from_uuid(Uuid::from_u128(n))))] += 1;
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
    fn partitions_are_spread_evenly_over_members() {
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
    fn member_order_does_not_change_owners() {
        let mut names = names(5);
        let owners: Vec<String> = owners_of(&names).into_iter().map(str::to_owned).collect();
        names.reverse();
        names.push(names[2].clone());
        assert_eq!(owners_of(&names), owners);
    }

    #[test]
    fn leaving_member_moves_few_partitions_of_the_others() {
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
