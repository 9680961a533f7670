//! JSON Schemas from scripts. Scripts are not trusted: a few lines of schema can take forever to
//! apply.

use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

/// Largest schema, in bytes of JSON.
const MAX_BYTES: usize = 64 << 10;
/// Maximum number of parts of a schema after each reference is replaced by its target.
const MAX_PARTS: usize = 5_000;
/// Keywords for references whose size cannot be computed in advance.
const UNSUPPORTED_KEYWORDS: [&str; 4] = ["$dynamicRef", "$recursiveRef", "$id", "$anchor"];
/// Maximum work (parts of the schema times values) for finding all faults; above it, only the first
/// fault is found.
const MAX_EXHAUSTIVE_WORK: usize = 200_000;
/// Maximum work for validating at all.
const MAX_WORK: usize = 20_000_000;
/// Longest fault, in characters.
const MAX_FAULT_CHARS: usize = 300;

/// Checks whether the schema can be used.
///
/// # Errors
/// The reason, for a model.
pub(super) fn check(schema: &Value) -> Result<(), String> {
    if !schema.is_object() {
        return Err("the schema must be an object".to_owned());
    }
    if schema.to_string().len() > MAX_BYTES {
        return Err(format!("the schema is larger than {MAX_BYTES} bytes"));
    }
    count_parts(schema, schema, &mut Vec::new(), &mut 0)?;
    compile(schema).map(drop)
}

/// The faults of a value; empty when it is valid.
pub(super) fn faults(schema: &Value, value: &Value, most: usize) -> Vec<String> {
    let validator = match compile(schema) {
        Ok(validator) => validator,
        Err(what) => return vec![what],
    };
    let mut parts = 0;
    if let Err(what) = count_parts(schema, schema, &mut Vec::new(), &mut parts) {
        return vec![what];
    }
    let work = parts.saturating_mul(count_values(value));
    if work > MAX_WORK {
        return vec!["the value has too many parts for this schema".to_owned()];
    }
    let fault = |error: jsonschema::ValidationError<'_>| {
        let place = error.instance_path().to_string();
        let place = if place.is_empty() { "the value".to_owned() } else { place };
        format!("{place}: {error}").chars().take(MAX_FAULT_CHARS).collect()
    };
    // The validator computes all faults, however few are taken.
    if work <= MAX_EXHAUSTIVE_WORK {
        return validator.iter_errors(value).take(most).map(fault).collect();
    }
    validator.validate(value).err().map(fault).into_iter().collect()
}

/// The number of values in a value, itself included.
fn count_values(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(count_values).sum::<usize>(),
        Value::Object(fields) => 1 + fields.values().map(count_values).sum::<usize>(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 1,
    }
}

fn compile(schema: &Value) -> Result<Validator, String> {
    jsonschema::options()
        // Takes time proportional to the text, whatever the pattern.
        .with_pattern_options(PatternOptions::regex())
        .build(schema)
        .map_err(|error| {
            format!("the schema is invalid: {error}").chars().take(MAX_FAULT_CHARS).collect()
        })
}

/// Counts the parts of a schema, following its references. A recursive schema is rejected: only the
/// value would bound its work.
fn count_parts<'a>(
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
            if let Some(word) = UNSUPPORTED_KEYWORDS.iter().find(|word| fields.contains_key(**word))
            {
                return Err(format!("the schema uses `{word}`, which is not supported"));
            }
            if let Some(Value::String(reference)) = fields.get("$ref") {
                let target = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
                let target = target.ok_or_else(|| {
                    format!("the reference {reference:?} has no target in the schema")
                })?;
                if open.contains(&reference.as_str()) {
                    return Err(format!("the schema is recursive, through {reference:?}"));
                }
                open.push(reference);
                count_parts(root, target, open, parts)?;
                open.pop();
            }
            // Definitions are counted too: a property may have the same name.
            fields.values().try_for_each(|field| count_parts(root, field, open, parts))
        }
        Value::Array(list) => list.iter().try_for_each(|item| count_parts(root, item, open, parts)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn faults_have_path_and_reason() {
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
    fn schema_with_unbounded_work_is_rejected() {
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
    fn expensive_validation_reports_only_the_first_fault() {
        let wide = json!({"items": {"allOf": vec![json!({"type": "string"}); 1_500]}});
        assert_eq!(check(&wide), Ok(()));
        assert_eq!(faults(&wide, &json!(vec![1; 1_000]), 9).len(), 1);
        let found = faults(&wide, &json!(vec![1; 100_000]), 9);
        assert!(found[0].contains("too many parts"), "{found:?}");
    }

    #[test]
    fn pattern_takes_linear_time() {
        let schema = json!({"type": "string", "pattern": "^(a+)+$"});
        assert_eq!(check(&schema), Ok(()));
        let began = std::time::Instant::now();
        assert_eq!(faults(&schema, &json!("a".repeat(50_000) + "b"), 9).len(), 1);
        assert!(began.elapsed() < std::time::Duration::from_secs(5));
    }
}
