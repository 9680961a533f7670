//! Checking the arguments of a call against the definition of the tool.

use serde_json::{Map, Number, Value};

use super::definition::Definition;
use super::error::ToolError;
use super::kind::{Kind, MAX_ARGUMENTS, MAX_PATH_BYTES, MAX_TEXTS, Parameter};

/// Checks arguments given by name or by position, and returns their canonical form: by name, keys
/// sorted, whole numbers as integers, paths as `normalize` returns them, without absent ones
/// (`null` counts as absent).
pub(super) fn check(
    tool: &Definition,
    args: Value,
    normalize: &dyn Fn(&str) -> String,
) -> Result<Value, ToolError> {
    let named = by_name(tool, args)?;
    let mut checked =
        Value::Object(Check { tool, normalize }.object(tool.parameters, named, "")?);
    checked.sort_all_objects();
    Ok(checked)
}

/// The path without `.`, repeated slashes and trailing slashes, and without `..` where the text
/// alone resolves it.
///
/// The kernel resolves `..` after a symbolic link to the parent of the link's target. The tools run
/// with the normalized path, so that a policy decides about exactly what is done.
pub(super) fn normalize_lexically(path: &str) -> String {
    let absolute = path.starts_with('/');
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.last().is_some_and(|last| *last != "..") => drop(parts.pop()),
            ".." if absolute => {}
            part => parts.push(part),
        }
    }
    match (absolute, parts.is_empty()) {
        (true, _) => format!("/{}", parts.join("/")),
        (false, true) => ".".to_owned(),
        (false, false) => parts.join("/"),
    }
}

fn by_name(tool: &Definition, args: Value) -> Result<Map<String, Value>, ToolError> {
    let mut list = match args {
        Value::Object(named) => return Ok(named),
        Value::Null => Vec::new(),
        Value::Array(list) => list,
        other => vec![other],
    };
    // `read_file({path: "a"})` means the same as `read_file("a")` if the first parameter does not
    // take an object.
    let first_is_object = tool.parameters.first().is_some_and(|first| first.kind.takes_object());
    if list.len() == 1 && list[0].is_object() && !first_is_object {
        if let Some(Value::Object(named)) = list.pop() {
            return Ok(named);
        }
        return Ok(Map::new());
    }
    let (given, most) = (list.len(), tool.positional().count());
    if given > most {
        return Err(invalid_arguments(
            tool,
            format!("takes at most {most} arguments, but got {given}"),
        ));
    }
    Ok(tool
        .positional()
        .zip(list)
        .map(|(parameter, value)| (parameter.name.to_owned(), value))
        .collect())
}

/// The check of one call.
struct Check<'a> {
    tool: &'a Definition,
    normalize: &'a dyn Fn(&str) -> String,
}

impl Check<'_> {
    fn object(
        &self,
        parameters: &[Parameter],
        mut given: Map<String, Value>,
        prefix: &str,
    ) -> Result<Map<String, Value>, ToolError> {
        let mut checked = Map::new();
        for parameter in parameters {
            let path = format!("{prefix}{}", parameter.name);
            match given.remove(parameter.name) {
                None | Some(Value::Null) if parameter.required => {
                    let expected = parameter.kind.requirement();
                    return Err(invalid_arguments(
                        self.tool,
                        format!("is missing {path:?}, which is {expected}"),
                    ));
                }
                None | Some(Value::Null) => {}
                Some(value) => {
                    checked.insert(
                        parameter.name.to_owned(),
                        self.value(&parameter.kind, value, &path)?,
                    );
                }
            }
        }
        if let Some(unknown) = given.keys().next() {
            let names: Vec<&str> = parameters.iter().map(|p| p.name).collect();
            let shown: String = unknown.chars().take(100).collect();
            let near = similar::get_close_matches(shown.as_str(), &names, 1, 0.6);
            let hint =
                near.first().map(|near| format!(" (did you mean {near:?}?)")).unwrap_or_default();
            let unknown = format!("{prefix}{shown}");
            let names = if names.is_empty() {
                "it takes no parameters".to_owned()
            } else {
                format!("the parameters are: {}", names.join(", "))
            };
            return Err(invalid_arguments(
                self.tool,
                format!("has no parameter {unknown:?}{hint}; {names}"),
            ));
        }
        Ok(checked)
    }

    fn value(&self, kind: &Kind, value: Value, path: &str) -> Result<Value, ToolError> {
        let mismatch = |value: &Value| {
            let (expected, given) = (kind.requirement(), describe(value));
            invalid_arguments(
                self.tool,
                format!("needs {path:?} to be {expected}, but got {given}"),
            )
        };
        let all_texts = |value: &Value, most: usize, longest: usize| {
            let fits = |item: &Value| item.as_str().is_some_and(|text| text.len() <= longest);
            value.as_array().is_some_and(|items| items.len() <= most && items.iter().all(fits))
        };
        match (kind, value) {
            (Kind::Any, value) => Ok(value),
            (Kind::Boolean, value @ Value::Bool(_)) => Ok(value),
            (Kind::Path | Kind::File, Value::String(text)) => self.path(kind, text, path),
            (Kind::Text { min_bytes, max_bytes }, Value::String(text)) => {
                if (*min_bytes..=*max_bytes).contains(&text.len()) {
                    Ok(Value::String(text))
                } else {
                    Err(mismatch(&text.into()))
                }
            }
            (Kind::Integer { min, max }, Value::Number(number)) => match exact_integer(&number) {
                Some(number) if (*min..=*max).contains(&number) => Ok(number.into()),
                _ => Err(mismatch(&Value::Number(number))),
            },
            (Kind::Number { min, max }, Value::Number(number)) => match number.as_f64() {
                Some(float) if (*min..=*max).contains(&float) => Ok(Value::Number(number)),
                _ => Err(mismatch(&Value::Number(number))),
            },
            (Kind::OneOf(words), Value::String(word)) => {
                // HTTP methods, for example, are written in either case.
                match words.iter().find(|known| known.eq_ignore_ascii_case(&word)) {
                    Some(known) => Ok((*known).into()),
                    None => Err(mismatch(&word.into())),
                }
            }
            (Kind::TextOrTexts { max_bytes }, Value::String(text)) if text.len() <= *max_bytes => {
                Ok(vec![text].into())
            }
            (Kind::TextOrTexts { max_bytes }, value)
                if all_texts(&value, MAX_TEXTS, *max_bytes) =>
            {
                Ok(value)
            }
            (Kind::Arguments | Kind::CodeOrArguments { .. }, value)
                if all_texts(&value, MAX_ARGUMENTS, usize::MAX) =>
            {
                Ok(value)
            }
            (Kind::CodeOrArguments { max_bytes }, Value::String(code))
                if code.len() <= *max_bytes =>
            {
                Ok(Value::String(code))
            }
            (Kind::TextMap, Value::Object(map)) => {
                for (name, value) in &map {
                    if !value.is_string() {
                        let shown: String = name.chars().take(100).collect();
                        let (given, path) = (describe(value), format!("{path}.{shown}"));
                        return Err(invalid_arguments(
                            self.tool,
                            format!("needs {path:?} to be a string, but got {given}"),
                        ));
                    }
                }
                Ok(Value::Object(map))
            }
            (Kind::Object(properties), Value::Object(map)) => {
                self.object(properties, map, &format!("{path}.")).map(Value::Object)
            }
            (Kind::Objects(properties), Value::Array(items)) if !items.is_empty() => {
                let mut checked = Vec::with_capacity(items.len());
                for (index, item) in items.into_iter().enumerate() {
                    let path = format!("{path}[{index}]");
                    let Value::Object(map) = item else {
                        let given = describe(&item);
                        return Err(invalid_arguments(
                            self.tool,
                            format!("needs {path:?} to be an object, but got {given}"),
                        ));
                    };
                    checked.push(Value::Object(self.object(
                        properties,
                        map,
                        &format!("{path}."),
                    )?));
                }
                Ok(Value::Array(checked))
            }
            (_, value) => Err(mismatch(&value)),
        }
    }

    fn path(&self, kind: &Kind, text: String, path: &str) -> Result<Value, ToolError> {
        if text.is_empty() || text.len() > MAX_PATH_BYTES {
            let (expected, given) = (kind.requirement(), describe(&Value::String(text)));
            return Err(invalid_arguments(
                self.tool,
                format!("needs {path:?} to be {expected}, but got {given}"),
            ));
        }
        if matches!(kind, Kind::File) && text.ends_with('/') {
            let what =
                format!("needs {path:?} to be the path of a file, but {text:?} ends with a slash");
            return Err(invalid_arguments(self.tool, what));
        }
        Ok(Value::String((self.normalize)(&text)))
    }
}

/// The number, if it is whole, not negative, and exact in JavaScript, whose numbers are
/// floating-point.
fn exact_integer(number: &Number) -> Option<u64> {
    number.as_u64().or_else(|| {
        let float = number.as_f64()?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "checked to be whole and in range"
        )]
        let integer = (float.fract() == 0.0 && (0.0..9_007_199_254_740_992.0).contains(&float))
            .then_some(float as u64);
        integer
    })
}

/// Describes a value and its type, short enough for a message.
fn describe(value: &Value) -> String {
    const MAX_SHOWN_BYTES: usize = 80;
    let kind = match value {
        Value::Null => return "null".to_owned(),
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(text) if text.len() > MAX_SHOWN_BYTES => {
            return format!("a string of {} bytes", text.len());
        }
        Value::String(_) => "string",
        Value::Array(items) => return format!("a list of {} items", items.len()),
        Value::Object(map) => {
            let names: Vec<&str> = map.keys().take(8).map(String::as_str).collect();
            let names: String = names.join(", ").chars().take(MAX_SHOWN_BYTES).collect();
            return format!("an object with the properties [{names}]");
        }
    };
    format!("{value} ({kind})")
}

fn invalid_arguments(tool: &Definition, what: String) -> ToolError {
    let Definition { name, example, .. } = tool;
    ToolError::invalid(format!(
        "{name} {what}. Signature: {}. Example: {example}",
        tool.signature()
    ))
}

#[cfg(test)]
mod tests {
    use super::normalize_lexically;

    #[test]
    fn path_is_normalized_by_its_text_alone() {
        for (given, expected) in [
            ("a/b", "a/b"),
            ("./a//b/", "a/b"),
            ("a/../b", "b"),
            ("a/b/../../c", "c"),
            ("a/..", "."),
            (".", "."),
            ("/", "/"),
            ("../x", "../x"),
            ("a/../../x", "../x"),
            ("../../x/..", "../.."),
            ("/../a/./b", "/a/b"),
            ("...", "..."),
            ("a/...b/c ", "a/...b/c "),
        ] {
            assert_eq!(normalize_lexically(given), expected, "{given}");
            assert_eq!(normalize_lexically(expected), expected);
        }
    }
}
