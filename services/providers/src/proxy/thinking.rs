//! What a vendor wants back of a model's thinking, in the hands of a client: opaque to it, and
//! bound to the provider it came from, because another account could not read it and would refuse
//! the conversation. Where nothing is opaque, it is text like any other that a client may send.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};

use crate::transcript::{Part, Turn};

/// `data` of a thought of the provider, as a client is given it.
pub(crate) fn seal(provider_id: &str, data: &str) -> String {
    URL_SAFE_NO_PAD.encode(format!("{provider_id}\n{data}"))
}

/// What a client gave back, when it came from the provider.
fn open(sealed: &str, provider_id: &str) -> Option<String> {
    let text = String::from_utf8(URL_SAFE_NO_PAD.decode(sealed).ok()?).ok()?;
    let (from, data) = text.split_once('\n')?;
    (from == provider_id).then(|| data.to_owned())
}

/// The turns with the provider's own thoughts opened; those of others are left out. `plain`: its
/// vendor takes thoughts as mere text, and so also those that nothing opaque belongs to.
pub(crate) fn open_turns(mut turns: Vec<Turn>, provider_id: &str, plain: bool) -> Vec<Turn> {
    for turn in &mut turns {
        turn.parts.retain_mut(|part| {
            let Part::Thinking { data, .. } = part else { return true };
            if data.is_empty() {
                return plain;
            }
            match open(data, provider_id) {
                Some(opened) => {
                    *data = opened;
                    true
                }
                None => false,
            }
        });
    }
    turns
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transcript::Role;

    #[test]
    fn thinking_opens_only_for_its_provider() {
        let thought = |data: String| Part::Thinking { text: "Hm.".into(), data };
        let turn =
            |part| vec![Turn { role: Role::Assistant, parts: vec![part, Part::Text("x".into())] }];
        let given = seal("provider_1", "{\"signature\":\"s\"}");
        let back = open_turns(turn(thought(given.clone())), "provider_1", false);
        assert_eq!(back[0].parts[0], thought("{\"signature\":\"s\"}".into()));
        for (given, to) in [
            (given, "provider_2"),
            ("of another kind".into(), "provider_1"),
            (String::new(), "provider_1"),
        ] {
            assert_eq!(open_turns(turn(thought(given)), to, false)[0].parts, [Part::Text("x".into())]);
        }
        let bare = || turn(thought(String::new()));
        assert_eq!(open_turns(bare(), "provider_1", true), bare());
        let foreign = turn(thought(seal("provider_1", "")));
        assert_eq!(open_turns(foreign, "provider_2", true)[0].parts, [Part::Text("x".into())]);
    }
}
