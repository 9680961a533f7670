//! Breadth-first search through all transitions, then backwards from the settled states.

use std::{
    collections::{HashMap, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
};

use super::mesh::{Label, Mesh};

/// More than any scope of the tests has. A model that grows without bound is a defect of the model.
const MAX_STATES: usize = 3_000_000;

/// The transition by which a state was first reached.
struct Node {
    from: u32,
    /// The index of the transition there.
    nth: u16,
}

/// Returns the number of reachable states.
///
/// # Errors
/// The shortest path to a state that violates a property, or from which no settled state is
/// reachable.
pub(super) fn explore(start: Mesh) -> Result<usize, String> {
    let (mut indices, mut nodes) =
        (HashMap::from([(fingerprint(&start), 0_u32)]), vec![Node { from: 0, nth: 0 }]);
    let (mut backwards, mut settled) = (vec![Vec::new()], Vec::new());
    let mut open = VecDeque::from([(0_u32, start.clone())]);
    while let Some((from, mesh)) = open.pop_front() {
        if mesh.is_settled() {
            settled.push(from);
        }
        for (nth, (_, next)) in mesh.transitions().into_iter().enumerate() {
            let nth = u16::try_from(nth).expect("a state has few transitions");
            let next = match next {
                Ok(next) => next,
                Err(path) => {
                    return Err(format!("{path}\n{}", trace(&start, &nodes, from, Some(nth))));
                }
            };
            let at = *indices.entry(fingerprint(&next)).or_insert_with(|| {
                let at = u32::try_from(nodes.len()).expect("fewer than MAX_STATES");
                nodes.push(Node { from, nth });
                backwards.push(Vec::new());
                open.push_back((at, next));
                at
            });
            backwards[at as usize].push(from);
        }
        assert!(nodes.len() < MAX_STATES, "there is no end to it");
    }
    let mut can_settle = vec![false; nodes.len()];
    while let Some(at) = settled.pop() {
        if !std::mem::replace(&mut can_settle[at as usize], true) {
            settled.extend(&backwards[at as usize]);
        }
    }
    // The numbers are in order of distance.
    match can_settle.iter().position(|can_settle| !can_settle) {
        None => Ok(nodes.len()),
        Some(at) => {
            let at = u32::try_from(at).expect("fewer than MAX_STATES");
            Err(format!("no settled state is reachable\n{}", trace(&start, &nodes, at, None)))
        }
    }
}

/// Two states with equal fingerprints are one. 128 bits, so that no two of millions collide by
/// chance.
fn fingerprint(mesh: &Mesh) -> (u64, u64) {
    let text = mesh.fingerprint();
    let hash = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, &text).hash(&mut hasher);
        hasher.finish()
    };
    (hash(1), hash(2))
}

/// The transitions up to a state, and the state.
fn trace(start: &Mesh, nodes: &[Node], to: u32, then: Option<u16>) -> String {
    let (mut choices, mut at) = (Vec::from_iter(then), to);
    while at != 0 {
        let node = &nodes[at as usize];
        choices.push(node.nth);
        at = node.from;
    }
    let (mut mesh, mut path) = (start.clone(), String::new());
    for nth in choices.into_iter().rev() {
        let (Label(what, index), next) = mesh.transitions().swap_remove(usize::from(nth));
        path.push_str(&format!("- {what} {index}\n"));
        match next {
            Ok(next) => mesh = next,
            Err(_) => break,
        }
    }
    format!("{path}{mesh:#?}")
}
