//! JSON Schemas that scripts bring along. The script is not trusted: a few lines of schema can take
//! for ever to apply.

use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

/// Largest schema, as JSON.
const MAX_BYTES: usize = 64 << 10;
/// How many parts a schema may have when each reference is replaced by what it refers to.
const MAX_PARTS: usize = 5_000;
/// Words by which a schema refers elsewhere in ways that cannot be weighed beforehand.
const REFUSED: [&str; 4] = ["$dynamicRef", "$recursiveRef", "$id", "$anchor"];
/// How many of its parts may be held against how many places of a value for all faults to be looked
/// for; above that only the first is.
const ALL_FAULTS: usize = 200_000;
/// The same for it to be looked at at all.
const MAX_WORK: usize = 20_000_000;
/// Longest fault that is told.
const MAX_FAULT: usize = 300;

/// Whether the schema can be used.
///
/// # Errors
/// Why not, in words for a model.
pub(super) fn check(schema: &Value) -> Result<(), String> {
    if !schema.is_object() {
        return Err("the schema must be an object".to_owned());
    }
    if schema.to_string().len() > MAX_BYTES {
        return Err(format!("the schema is larger than {MAX_BYTES} bytes"));
    }
    weigh(schema, schema, &mut Vec::new(), &mut 0)?;
    compile(schema).map(drop)
}

/// What is wrong with a value; nothing when it is valid.
pub(super) fn faults(schema: &Value, value: &Value, most: usize) -> Vec<String> {
    let validator = match compile(schema) {
        Ok(validator) => validator,
        Err(what) => return vec![what],
    };
    let mut parts = 0;
    if let Err(what) = weigh(schema, schema, &mut Vec::new(), &mut parts) {
        return vec![what];
    }
    let work = parts.saturating_mul(places(value));
    if work > MAX_WORK {
        return vec!["the value has too many parts to be held against this schema".to_owned()];
    }
    let fault = |error: jsonschema::ValidationError<'_>| {
        let place = error.instance_path().to_string();
        let place = if place.is_empty() { "the value".to_owned() } else { place };
        format!("{place}: {error}").chars().take(MAX_FAULT).collect()
    };
    // It gathers all of them, however few are taken.
    if work <= ALL_FAULTS {
        return validator.iter_errors(value).take(most).map(fault).collect();
    }
    validator.validate(value).err().map(fault).into_iter().collect()
}

/// How many values there are in a value, itself included.
fn places(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(places).sum::<usize>(),
        Value::Object(fields) => 1 + fields.values().map(places).sum::<usize>(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 1,
    }
}

fn compile(schema: &Value) -> Result<Validator, String> {
    jsonschema::options()
        // Takes time in proportion to the text, whatever the pattern.
        .with_pattern_options(PatternOptions::regex())
        .build(schema)
        .map_err(|error| format!("the schema is none: {error}").chars().take(MAX_FAULT).collect())
}

/// Counts the parts of a schema with its references followed. A schema that contains itself is
/// refused: how long it takes would depend on the value alone.
fn weigh<'a>(
    root: &'a Value,
    part: &'a Value,
    open: &mut Vec<&'a str>,
    parts: &mut usize,
) -> Result<(), String> {
    *parts += 1;
    if *parts > MAX_PARTS {
        return Err(format!(
            "the schema has more than {MAX_PARTS} parts when its references are followed"
        ));
    }
    match part {
        Value::Object(fields) => {
            if let Some(word) = REFUSED.iter().find(|word| fields.contains_key(**word)) {
                return Err(format!("`{word}` cannot be used in the schema"));
            }
            if let Some(Value::String(reference)) = fields.get("$ref") {
                let target = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
                let target = target.ok_or_else(|| {
                    format!("the reference {reference:?} leads nowhere in the schema")
                })?;
                if open.contains(&reference.as_str()) {
                    return Err(format!("the schema contains itself, through {reference:?}"));
                }
                open.push(reference);
                weigh(root, target, open, parts)?;
                open.pop();
            }
            // Definitions too: a property may have their name.
            fields.values().try_for_each(|field| weigh(root, field, open, parts))
        }
        Value::Array(list) => list.iter().try_for_each(|item| weigh(root, item, open, parts)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn faults_say_where_and_what() {
        let schema = json!({"type": "object", "required": ["name"], "properties": {
            "name": {"type": "string", "minLength": 2}, "age": {"$ref": "#/$defs/age"}}, "$defs": {"age": {"type": "integer"}}});
        assert_eq!(check(&schema), Ok(()));
        assert!(faults(&schema, &json!({"name": "Ada", "age": 7}), 9).is_empty());
        let found = faults(&schema, &json!({"name": "A", "age": "7"}), 9);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found.iter().any(|fault| fault.starts_with("/age: ")), "{found:?}");
        assert_eq!(faults(&schema, &json!({"name": "A", "age": "7"}), 1).len(), 1);
    }

    #[test]
    fn a_schema_that_would_take_for_ever_is_refused() {
        let mut doubling = json!({"$ref": "#/$defs/d0", "$defs": {}});
        for n in 0..40 {
            let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
            doubling["$defs"][format!("d{n}")] = json!({"allOf": [next, next]});
        }
        doubling["$defs"]["d40"] = json!(true);
        let mut hidden = doubling.clone();
        hidden.as_object_mut().expect("an object").remove("$ref");
        hidden["properties"] = json!({"definitions": {"$ref": "#/$defs/d0"}});
        for schema in [
            doubling,
            hidden,
            json!({"allOf": [{"$ref": "#"}]}),
            json!({"properties": {"a": {"$ref": "#"}}}),
            json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
            json!({"$ref": "https://example.com/schema"}),
            json!({"$dynamicRef": "#x"}),
            json!({"type": "no such type"}),
            json!({"description": "x".repeat(MAX_BYTES)}),
            json!([]),
            json!(true),
        ] {
            assert!(check(&schema).is_err(), "{schema}");
        }
    }

    #[test]
    fn many_parts_against_many_places_are_not_gathered() {
        let wide = json!({"items": {"allOf": vec![json!({"type": "string"}); 1_500]}});
        assert_eq!(check(&wide), Ok(()));
        assert_eq!(faults(&wide, &json!(vec![1; 1_000]), 9).len(), 1);
        let found = faults(&wide, &json!(vec![1; 100_000]), 9);
        assert!(found[0].contains("too many parts"), "{found:?}");
    }

    #[test]
    fn a_pattern_takes_time_in_proportion_to_the_text() {
        let schema = json!({"type": "string", "pattern": "^(a+)+$"});
        assert_eq!(check(&schema), Ok(()));
        let began = std::time::Instant::now();
        assert_eq!(faults(&schema, &json!("a".repeat(50_000) + "b"), 9).len(), 1);
        assert!(began.elapsed() < std::time::Duration::from_secs(5));
    }
}
