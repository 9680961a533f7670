//! Breadth first through everything that can happen, then backwards from where all is well.

use std::{
    collections::{HashMap, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
};

use super::mesh::{Label, Mesh};

/// More than any scope of the tests has; a model that grows without end is a defect of the model.
const MOST: usize = 3_000_000;

/// How a state was first reached.
struct Node {
    from: u32,
    /// Which of the things that can happen there.
    nth: u16,
}

/// The number of states that can be reached.
///
/// # Errors
/// The shortest way to a state in which something does not hold, or from which none can be reached
/// in which all is well.
pub(super) fn explore(start: Mesh) -> Result<usize, String> {
    let (mut known, mut nodes) =
        (HashMap::from([(fingerprint(&start), 0_u32)]), vec![Node { from: 0, nth: 0 }]);
    let (mut backwards, mut well) = (vec![Vec::new()], Vec::new());
    let mut open = VecDeque::from([(0_u32, start.clone())]);
    while let Some((from, mesh)) = open.pop_front() {
        if mesh.is_well() {
            well.push(from);
        }
        for (nth, (_, next)) in mesh.what_can_happen().into_iter().enumerate() {
            let nth = u16::try_from(nth).expect("few things can happen at once");
            let next = match next {
                Ok(next) => next,
                Err(words) => {
                    return Err(format!("{words}\n{}", way(&start, &nodes, from, Some(nth))));
                }
            };
            let at = *known.entry(fingerprint(&next)).or_insert_with(|| {
                let at = u32::try_from(nodes.len()).expect("fewer than MOST");
                nodes.push(Node { from, nth });
                backwards.push(Vec::new());
                open.push_back((at, next));
                at
            });
            backwards[at as usize].push(from);
        }
        assert!(nodes.len() < MOST, "there is no end to it");
    }
    let mut saved = vec![false; nodes.len()];
    while let Some(at) = well.pop() {
        if !std::mem::replace(&mut saved[at as usize], true) {
            well.extend(&backwards[at as usize]);
        }
    }
    // The numbers are in the order of their distance.
    match saved.iter().position(|saved| !saved) {
        None => Ok(nodes.len()),
        Some(at) => {
            let at = u32::try_from(at).expect("fewer than MOST");
            Err(format!("nothing leads on from here\n{}", way(&start, &nodes, at, None)))
        }
    }
}

/// Two states are one when they look the same. Of 128 bits, so that no two of millions are taken
/// for one by chance.
fn fingerprint(mesh: &Mesh) -> (u64, u64) {
    let text = mesh.fingerprint();
    let hash = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, &text).hash(&mut hasher);
        hasher.finish()
    };
    (hash(1), hash(2))
}

/// What has happened until there, and what the last state is.
fn way(start: &Mesh, nodes: &[Node], to: u32, then: Option<u16>) -> String {
    let (mut choices, mut at) = (Vec::from_iter(then), to);
    while at != 0 {
        let node = &nodes[at as usize];
        choices.push(node.nth);
        at = node.from;
    }
    let (mut mesh, mut words) = (start.clone(), String::new());
    for nth in choices.into_iter().rev() {
        let (Label(what, who), next) = mesh.what_can_happen().swap_remove(usize::from(nth));
        words.push_str(&format!("- {what} {who}\n"));
        match next {
            Ok(next) => mesh = next,
            Err(_) => break,
        }
    }
    format!("{words}{mesh:#?}")
}
