//! Variables in the texts of a script: `{{name}}`, and `{{json name}}` for a JavaScript literal.

use super::ConversationState;

/// `text` with every known variable replaced; anything else between braces stays.
pub(super) fn expand(text: &str, state: &ConversationState, model: &str) -> String {
    let mut filled = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("{{") {
        filled.push_str(before);
        match after
            .split_once("}}")
            .and_then(|(name, after)| Some((variable(name.trim(), state, model)?, after)))
        {
            Some((value, after)) => {
                filled.push_str(&value);
                rest = after;
            }
            None => {
                filled.push_str("{{");
                rest = after;
            }
        }
    }
    filled.push_str(rest);
    filled
}

fn variable(name: &str, state: &ConversationState, model: &str) -> Option<String> {
    if let Some(name) = name.strip_prefix("json ") {
        return Some(serde_json::Value::String(variable(name.trim(), state, model)?).to_string());
    }
    Some(match name {
        "first_user_text" => state.first_user_text.clone(),
        "last_user_text" => state.last_user_text.clone(),
        "last_result" => state.last_result.clone(),
        "user_messages" => state.user_messages.to_string(),
        "turn" => state.answers.to_string(),
        "model" => model.to_owned(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_variables_are_expanded_and_others_stay() {
        let state = ConversationState {
            last_user_text: "say \"{{turn}}\"".into(),
            answers: 3,
            ..ConversationState::default()
        };
        let fill = |text| expand(text, &state, "m");
        assert_eq!(fill("{{turn}} of {{ model }}"), "3 of m");
        assert_eq!(fill("print({{json last_user_text}})"), r#"print("say \"{{turn}}\"")"#);
        assert_eq!(fill("`${{a: 1}}` {{unknown}} {{turn"), "`${{a: 1}}` {{unknown}} {{turn");
        assert_eq!(fill("{{{{turn}}"), "{{3");
    }
}
