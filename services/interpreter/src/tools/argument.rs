//! Checking the arguments of a call against the definition of the tool.

use serde_json::{Map, Number, Value};

use super::definition::{Definition, Kind, MAX_TEXT_BYTES, MAX_TEXTS, Parameter};
use super::error::ToolError;

/// Checks arguments given by name or by position. Returns them by name, whole numbers as integers, without those that
/// are absent (`null` counts as absent).
pub(super) fn check(tool: &Definition, args: Value) -> Result<Value, ToolError> {
    let named = by_name(tool, args)?;
    object(tool, tool.parameters, named, "").map(Value::Object)
}

fn by_name(tool: &Definition, args: Value) -> Result<Map<String, Value>, ToolError> {
    let mut list = match args {
        Value::Object(named) => return Ok(named),
        Value::Null => Vec::new(),
        Value::Array(list) => list,
        other => vec![other],
    };
    // `read_file({path: "a"})` means the same as `read_file("a")` where the first parameter is no object itself.
    let first_is_object =
        matches!(tool.parameters.first().map(|p| &p.kind), Some(Kind::Object(_) | Kind::TextMap | Kind::Any));
    if list.len() == 1 && list[0].is_object() && !first_is_object {
        if let Some(Value::Object(named)) = list.pop() {
            return Ok(named);
        }
        return Ok(Map::new());
    }
    if list.len() > tool.parameters.len() {
        let (given, most) = (list.len(), tool.parameters.len());
        return Err(wrong(tool, format!("takes at most {most} arguments, but got {given}")));
    }
    Ok(tool.parameters.iter().zip(list).map(|(parameter, value)| (parameter.name.to_owned(), value)).collect())
}

fn object(
    tool: &Definition,
    parameters: &[Parameter],
    mut given: Map<String, Value>,
    prefix: &str,
) -> Result<Map<String, Value>, ToolError> {
    let mut checked = Map::new();
    for parameter in parameters {
        let path = format!("{prefix}{}", parameter.name);
        match given.remove(parameter.name) {
            None | Some(Value::Null) if parameter.required => {
                let expected = parameter.kind.words();
                return Err(wrong(tool, format!("is missing {path:?}, which is {expected}")));
            }
            None | Some(Value::Null) => {}
            Some(value) => {
                checked.insert(parameter.name.to_owned(), value_of(tool, &parameter.kind, value, &path)?);
            }
        }
    }
    if let Some(unknown) = given.keys().next() {
        let names: Vec<&str> = parameters.iter().map(|p| p.name).collect();
        let shown: String = unknown.chars().take(100).collect();
        let near = similar::get_close_matches(shown.as_str(), &names, 1, 0.6);
        let hint = near.first().map(|near| format!(" (did you mean {near:?}?)")).unwrap_or_default();
        let unknown = format!("{prefix}{shown}");
        let known = names.join(", ");
        return Err(wrong(tool, format!("has no parameter {unknown:?}{hint}; known here are: {known}")));
    }
    Ok(checked)
}

fn value_of(tool: &Definition, kind: &Kind, value: Value, path: &str) -> Result<Value, ToolError> {
    let unfit = |value: &Value| {
        let (expected, given) = (kind.words(), described(value));
        wrong(tool, format!("needs {path:?} to be {expected}, but got {given}"))
    };
    match (kind, value) {
        (Kind::Any, value) => Ok(value),
        (Kind::Boolean, value @ Value::Bool(_)) => Ok(value),
        (Kind::Text { min_bytes, max_bytes }, Value::String(text)) => {
            if (*min_bytes..=*max_bytes).contains(&text.len()) {
                Ok(Value::String(text))
            } else {
                Err(unfit(&text.into()))
            }
        }
        (Kind::Integer { min, max }, Value::Number(number)) => match whole(&number) {
            Some(number) if (*min..=*max).contains(&number) => Ok(number.into()),
            _ => Err(unfit(&Value::Number(number))),
        },
        (Kind::OneOf(words), Value::String(word)) => {
            // Methods and the like are written in either case.
            match words.iter().find(|known| known.eq_ignore_ascii_case(&word)) {
                Some(known) => Ok((*known).into()),
                None => Err(unfit(&word.into())),
            }
        }
        (Kind::TextOrTexts, Value::String(text)) if text.len() <= MAX_TEXT_BYTES => Ok(vec![text].into()),
        (Kind::TextOrTexts, value @ Value::Array(_)) => {
            let fits = |item: &Value| item.as_str().is_some_and(|text| text.len() <= MAX_TEXT_BYTES);
            let texts = value.as_array().is_some_and(|items| items.len() <= MAX_TEXTS && items.iter().all(fits));
            if texts { Ok(value) } else { Err(unfit(&value)) }
        }
        (Kind::TextMap, Value::Object(map)) => {
            for (name, value) in &map {
                if !value.is_string() {
                    let given = described(value);
                    return Err(wrong(
                        tool,
                        format!("needs {:?} to be a string, but got {given}", format!("{path}.{name}")),
                    ));
                }
            }
            Ok(Value::Object(map))
        }
        (Kind::Object(properties), Value::Object(map)) => {
            object(tool, properties, map, &format!("{path}.")).map(Value::Object)
        }
        (Kind::Objects(properties), Value::Array(items)) if !items.is_empty() => {
            let mut checked = Vec::with_capacity(items.len());
            for (index, item) in items.into_iter().enumerate() {
                let Value::Object(map) = item else {
                    let given = described(&item);
                    return Err(wrong(tool, format!("needs \"{path}[{index}]\" to be an object, but got {given}")));
                };
                checked.push(Value::Object(object(tool, properties, map, &format!("{path}[{index}]."))?));
            }
            Ok(Value::Array(checked))
        }
        (_, value) => Err(unfit(&value)),
    }
}

/// The number, if it is whole, not negative, and exact in JavaScript, which has only floating-point numbers.
fn whole(number: &Number) -> Option<u64> {
    number.as_u64().or_else(|| {
        let float = number.as_f64()?;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be whole and in range")]
        let integer = (float.fract() == 0.0 && (0.0..9_007_199_254_740_992.0).contains(&float)).then_some(float as u64);
        integer
    })
}

/// A value, short enough for a message, with its type.
fn described(value: &Value) -> String {
    const SHOWN: usize = 80;
    let kind = match value {
        Value::Null => return "null".to_owned(),
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(text) if text.len() > SHOWN => return format!("a string of {} bytes", text.len()),
        Value::String(_) => "string",
        Value::Array(items) => return format!("a list of {} items", items.len()),
        Value::Object(map) => {
            let names: Vec<&str> = map.keys().take(8).map(String::as_str).collect();
            let names: String = names.join(", ").chars().take(SHOWN).collect();
            return format!("an object with the properties [{names}]");
        }
    };
    format!("{value} ({kind})")
}

fn wrong(tool: &Definition, what: String) -> ToolError {
    let Definition { name, example, .. } = tool;
    ToolError::invalid(format!("{name} {what}. Signature: {}. Example: {example}", tool.signature()))
}
