//! Thinking in the hands of a client: opaque, and bound to the provider it came from, because
//! another account could not read it and would reject the conversation. Thinking without opaque
//! data is text that any client may send.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};

use crate::transcript::{Part, Turn};

/// Seals `data` of a provider's thinking for a client.
pub(crate) fn seal(provider_id: &str, data: &str) -> String {
    URL_SAFE_NO_PAD.encode(format!("{provider_id}\n{data}"))
}

/// Opens sealed data of a client, if it came from the provider.
fn open(sealed: &str, provider_id: &str) -> Option<String> {
    let text = String::from_utf8(URL_SAFE_NO_PAD.decode(sealed).ok()?).ok()?;
    let (from, data) = text.split_once('\n')?;
    (from == provider_id).then(|| data.to_owned())
}

/// Opens the provider's own thinking in `turns`, and drops that of others. `plain`: the vendor
/// accepts thinking as plain text, and so also without opaque data.
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
            assert_eq!(
                open_turns(turn(thought(given)), to, false)[0].parts,
                [Part::Text("x".into())]
            );
        }
        let bare = || turn(thought(String::new()));
        assert_eq!(open_turns(bare(), "provider_1", true), bare());
        let foreign = turn(thought(seal("provider_1", "")));
        assert_eq!(open_turns(foreign, "provider_2", true)[0].parts, [Part::Text("x".into())]);
    }
}
