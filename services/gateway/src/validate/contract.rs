//! Checks requests against the contract's option `rule`.
//!
//! The check reads the encoded request, which has only the fields that are set. So no second copy
//! of it is made, and list entries beyond a limit are not decoded.

use std::{
    collections::HashMap,
    fmt::{self, Display},
    sync::LazyLock,
    time::Duration,
};

use construct_domain::{id, secret};
use construct_proto::{
    options,
    v1::{FieldRule, field_rule::Format},
};
use jiff::Timestamp;
use prost::{
    Message as _,
    bytes::Buf as _,
    encoding::{WireType, decode_key, decode_varint},
};
use prost_reflect::{EnumDescriptor, FieldDescriptor, MessageDescriptor};
use regex::Regex;

use super::{Violations, formats, thousands};

static CONTRACT: LazyLock<Contract> = LazyLock::new(Contract::read);

/// Checks an encoded message of the type with this full name, which must be a request of the
/// contract.
pub(super) fn check(name: &str, message: &[u8], violations: &mut Violations) {
    CONTRACT.check(CONTRACT.by_name[name], message, None, violations);
}

/// The rules of all messages in requests.
#[derive(Default)]
struct Contract {
    messages: Vec<MessageRules>,
    by_name: HashMap<String, usize>,
}

#[derive(Default)]
struct MessageRules {
    /// Sorted by number.
    fields: Vec<FieldRules>,
    /// Groups of fields, as indexes into `fields`: one field of each group must be set.
    required_oneofs: Vec<Vec<usize>>,
}

struct FieldRules {
    number: u32,
    name: String,
    kind: Kind,
    is_list: bool,
    /// Whether an empty value is distinct from an unset one.
    has_presence: bool,
    /// The value must not be shown, not even its length.
    is_redacted: bool,
    rule: FieldRule,
    pattern: Option<Regex>,
    id: Option<id::Kind>,
}

/// The type of a field, for the check of its values.
enum Kind {
    Text,
    Bytes,
    Signed,
    Unsigned,
    Double,
    Enum(EnumDescriptor),
    Time,
    Duration,
    /// An index into [`Contract::messages`].
    Message(usize),
    Unchecked,
}

/// An encoded field value.
#[derive(Clone, Copy)]
enum Value<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'a [u8]),
}

/// The path of a value in a request, e.g. `spec.fallbacks[0].model`.
struct Path<'a> {
    parent: Option<&'a Self>,
    name: &'a str,
    entry: Option<usize>,
}

impl Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(parent) = self.parent {
            write!(f, "{parent}.")?;
        }
        f.write_str(self.name)?;
        self.entry.map_or(Ok(()), |entry| write!(f, "[{entry}]"))
    }
}

impl Contract {
    fn read() -> Self {
        let mut contract = Self::default();
        for method in construct_proto::methods() {
            contract.add(&method.input());
        }
        contract
    }

    /// Returns the index of the message's rules. Adds them if they are missing.
    fn add(&mut self, message: &MessageDescriptor) -> usize {
        if let Some(index) = self.by_name.get(message.full_name()) {
            return *index;
        }
        let index = self.messages.len();
        // Registered before its fields are read: a message may contain itself.
        self.messages.push(MessageRules::default());
        self.by_name.insert(message.full_name().to_owned(), index);
        let mut fields: Vec<_> = message.fields().map(|field| self.field_rules(&field)).collect();
        fields.sort_by_key(|field| field.number);
        let required = message.oneofs().filter(options::is_one_required);
        let member =
            |field: FieldDescriptor| fields.iter().position(|known| known.number == field.number());
        let required_oneofs =
            required.map(|oneof| oneof.fields().filter_map(member).collect()).collect();
        self.messages[index] = MessageRules { fields, required_oneofs };
        index
    }

    fn field_rules(&mut self, field: &FieldDescriptor) -> FieldRules {
        let rule = options::rule(field);
        let kind = match field.kind() {
            prost_reflect::Kind::String => Kind::Text,
            prost_reflect::Kind::Bytes => Kind::Bytes,
            prost_reflect::Kind::Int32 | prost_reflect::Kind::Int64 => Kind::Signed,
            prost_reflect::Kind::Uint32 | prost_reflect::Kind::Uint64 => Kind::Unsigned,
            prost_reflect::Kind::Double => Kind::Double,
            prost_reflect::Kind::Enum(values) => Kind::Enum(values),
            prost_reflect::Kind::Message(message) => match message.full_name() {
                "google.protobuf.Timestamp" => Kind::Time,
                "google.protobuf.Duration" => Kind::Duration,
                name if name.starts_with("google.protobuf.") || message.is_map_entry() => {
                    Kind::Unchecked
                }
                _ => Kind::Message(self.add(&message)),
            },
            _ => Kind::Unchecked,
        };
        // An invalid pattern or prefix is a bug in the contract, which a test finds.
        let pattern = (!rule.pattern.is_empty())
            .then(|| Regex::new(&rule.pattern).expect("a valid regular expression"));
        let id = (!rule.id.is_empty())
            .then(|| id::Kind::with_prefix(&rule.id).expect("a known id prefix"));
        FieldRules {
            number: field.number(),
            name: field.name().to_owned(),
            kind,
            is_list: field.is_list(),
            has_presence: field.supports_presence(),
            is_redacted: options::is_redacted(field),
            rule,
            pattern,
            id,
        }
    }

    fn check(
        &self,
        index: usize,
        mut message: &[u8],
        parent: Option<&Path<'_>>,
        violations: &mut Violations,
    ) {
        let MessageRules { fields, required_oneofs } = &self.messages[index];
        // The number of values by field.
        let mut counts = vec![0_usize; fields.len()];
        while message.has_remaining() {
            // The request was encoded by this process, so it can be decoded.
            let Some((number, value)) = next_field(&mut message) else { return };
            let Ok(index) = fields.binary_search_by_key(&number, |field| field.number) else {
                continue;
            };
            let field = &fields[index];
            for value in field.values(value) {
                let entry = counts[index];
                counts[index] += 1;
                if field.is_list && field.rule.max_items.is_some_and(|max| entry >= max as usize) {
                    continue;
                }
                let path =
                    Path { parent, name: &field.name, entry: field.is_list.then_some(entry) };
                match field.kind {
                    Kind::Message(index) => {
                        if let Value::Bytes(message) = value {
                            self.check(index, message, Some(&path), violations);
                        }
                    }
                    _ => field.check(value, &path, violations),
                }
            }
        }
        for (field, count) in fields.iter().zip(&counts) {
            let path = Path { parent, name: &field.name, entry: None };
            if field.is_list {
                field.check_length(
                    &path,
                    "entries",
                    *count,
                    (field.rule.min_items, field.rule.max_items),
                    violations,
                );
            } else if *count == 0 {
                field.check_unset(&path, violations);
                if let Kind::Message(index) = field.kind
                    && field.rule.required
                {
                    self.check(index, &[], Some(&path), violations);
                }
            }
        }
        for oneof in required_oneofs {
            if oneof.iter().all(|index| counts[*index] == 0) {
                let names: Vec<_> =
                    oneof.iter().map(|index| format!("`{}`", fields[*index].name)).collect();
                let path = Path { parent, name: &fields[oneof[0]].name, entry: None };
                violations.add(
                    path.to_string(),
                    format!("is required, or one of {}", names[1..].join(", ")),
                );
            }
        }
    }
}

impl FieldRules {
    /// Returns the values of one occurrence of the field: several numbers may be packed.
    fn values<'a>(&self, value: Value<'a>) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let is_packed =
            self.is_list && matches!(self.kind, Kind::Signed | Kind::Unsigned | Kind::Enum(_));
        let (mut packed, mut single) = match value {
            Value::Bytes(bytes) if is_packed => (bytes, None),
            value => (&[][..], Some(value)),
        };
        std::iter::from_fn(move || {
            single.take().or_else(|| {
                if packed.is_empty() {
                    None
                } else {
                    decode_varint(&mut packed).ok().map(Value::Varint)
                }
            })
        })
    }

    /// Checks a set value that is not a message with rules of its own.
    fn check(&self, value: Value<'_>, path: &Path<'_>, violations: &mut Violations) {
        match (&self.kind, value) {
            (Kind::Text, Value::Bytes(bytes)) => {
                if let Ok(text) = std::str::from_utf8(bytes) {
                    self.check_text(text, path, violations);
                }
            }
            (Kind::Bytes, Value::Bytes(bytes)) => {
                self.check_length(
                    path,
                    "bytes",
                    bytes.len(),
                    (self.rule.min_bytes, self.rule.max_bytes),
                    violations,
                );
            }
            (Kind::Signed, Value::Varint(value)) => {
                self.check_number(i128::from(value as i64), path, violations)
            }
            (Kind::Unsigned, Value::Varint(value)) => {
                self.check_number(i128::from(value), path, violations)
            }
            (Kind::Double, Value::Fixed64(bits)) => {
                self.check_double(f64::from_bits(bits), path, violations)
            }
            (Kind::Enum(values), Value::Varint(value)) => {
                let is_known = values.get_value(value as i32).is_some();
                violations.require(is_known, path, || {
                    format!("is not a known value of `{}`", values.name())
                });
            }
            (Kind::Time, Value::Bytes(bytes)) => {
                let time = prost_types::Timestamp::decode(bytes).unwrap_or_default();
                let is_whole = (0..1_000_000_000).contains(&time.nanos);
                let is_valid = is_whole && Timestamp::new(time.seconds, time.nanos).is_ok();
                violations.require(is_valid, path, || "is not a valid time".into());
            }
            (Kind::Duration, Value::Bytes(bytes)) => {
                self.check_duration(
                    prost_types::Duration::decode(bytes).unwrap_or_default(),
                    path,
                    violations,
                );
            }
            _ => {}
        }
    }

    /// Checks an unset field.
    fn check_unset(&self, path: &Path<'_>, violations: &mut Violations) {
        if self.rule.required {
            return violations.add(
                path.to_string(),
                match self.rule.reference.as_str() {
                    "" => "is required".to_owned(),
                    reference => {
                        format!("is required: the name or id of {}", with_article(reference))
                    }
                },
            );
        }
        if !self.has_presence {
            match self.kind {
                Kind::Signed | Kind::Unsigned => self.check_number(0, path, violations),
                Kind::Double => self.check_double(0.0, path, violations),
                _ => {}
            }
        }
    }

    fn check_text(&self, text: &str, path: &Path<'_>, violations: &mut Violations) {
        let (rule, before) = (&self.rule, violations.len());
        if !rule.reference.is_empty() {
            let is_name = match rule.reference.as_str() {
                "secret" => {
                    secret::is_name(text) || text.parse::<construct_domain::SecretId>().is_ok()
                }
                // Ids of all other kinds have the form of a name.
                _ => formats::is_name(text),
            };
            violations.require(is_name, path, || {
                format!("is neither a name nor an id of {}", with_article(&rule.reference))
            });
        }
        if let Some(kind) = self.id
            && let Err(error) = kind.parse(text)
        {
            violations.add(path.to_string(), error.to_string());
        }
        if let Some(violation) =
            Format::try_from(rule.format).ok().and_then(|format| formats::violation(format, text))
        {
            violations.add(path.to_string(), violation);
        }
        if let Some(pattern) = &self.pattern {
            violations.require(pattern.is_match(text), path, || rule.hint.clone());
        }
        if rule.min_chars.is_some() || rule.max_chars.is_some() {
            let count = text.chars().count();
            self.check_length(
                path,
                "characters",
                count,
                (rule.min_chars, rule.max_chars),
                violations,
            );
        }
        self.check_length(path, "bytes", text.len(), (rule.min_bytes, rule.max_bytes), violations);
        let is_line = !rule.one_line || !text.chars().any(char::is_control);
        violations.require(is_line, path, || "must be one line, with no control characters".into());
        let is_blank = rule.not_blank && text.trim().is_empty();
        violations.require(!is_blank, path, || "must not be blank".into());
        // PostgreSQL cannot store U+0000, neither in text nor in JSON.
        if violations.len() == before {
            violations.require(!text.contains('\0'), path, || {
                "must not contain the character U+0000".into()
            });
        }
    }

    /// Checks a count against a minimum and a maximum.
    fn check_length(
        &self,
        path: &Path<'_>,
        what: &str,
        count: usize,
        (min, max): (Option<u32>, Option<u32>),
        violations: &mut Violations,
    ) {
        let is_within = min.is_none_or(|min| count >= min as usize)
            && max.is_none_or(|max| count <= max as usize);
        violations.require(is_within, path, || {
            let number = |number: Option<u32>| thousands(number.unwrap_or_default() as usize);
            let bounds = match (min.filter(|min| *min > 0), max) {
                (None, _) => format!("at most {}", number(max)),
                (Some(_), None) => format!("at least {}", number(min)),
                (Some(_), Some(_)) => format!("{} to {}", number(min), number(max)),
            };
            let has = if self.is_redacted {
                String::new()
            } else {
                format!(", has {}", thousands(count))
            };
            format!("must have {bounds} {what}{has}")
        });
    }

    fn check_number(&self, value: i128, path: &Path<'_>, violations: &mut Violations) {
        let (min, max) = (self.rule.min.map(i128::from), self.rule.max.map(i128::from));
        let is_within = min.is_none_or(|min| value >= min) && max.is_none_or(|max| value <= max);
        violations.require(is_within, path, || self.bounds(&value));
    }

    fn check_double(&self, value: f64, path: &Path<'_>, violations: &mut Violations) {
        let (min, max) = (self.rule.min.map(|min| min as f64), self.rule.max.map(|max| max as f64));
        if !value.is_finite() {
            return violations.add(path.to_string(), "must be a finite number");
        }
        let is_within = min.is_none_or(|min| value >= min) && max.is_none_or(|max| value <= max);
        violations.require(is_within, path, || self.bounds(&value));
    }

    /// Describes the bounds that `value` violates.
    fn bounds(&self, value: &dyn Display) -> String {
        let min = self.rule.min.or(matches!(self.kind, Kind::Unsigned).then_some(0));
        match (min, self.rule.max) {
            (Some(min), Some(max)) => format!("must be between {min} and {max}, is {value}"),
            (Some(0), None) => format!("must not be negative, is {value}"),
            (Some(min), None) => format!("must be at least {min}, is {value}"),
            (None, max) => format!("must be at most {}, is {value}", max.unwrap_or_default()),
        }
    }

    fn check_duration(
        &self,
        value: prost_types::Duration,
        path: &Path<'_>,
        violations: &mut Violations,
    ) {
        let (shortest, longest) =
            (to_std_duration(self.rule.shortest), to_std_duration(self.rule.longest));
        let is_within = to_std_duration(Some(value)).is_some_and(|value| {
            let is_bounded = shortest.is_none_or(|shortest| value >= shortest)
                && longest.is_none_or(|longest| value <= longest);
            is_bounded || self.rule.or_zero && value.is_zero()
        });
        violations.require(is_within, path, || {
            let zero = if self.rule.or_zero { "0, or " } else { "" };
            match (shortest, longest) {
                (Some(shortest), Some(longest)) => {
                    format!(
                        "must be {zero}{} to {}",
                        format_duration(shortest),
                        format_duration(longest)
                    )
                }
                _ => "is not a valid duration".to_owned(),
            }
        });
    }
}

/// Reads the next field of a message: its number and value.
fn next_field<'a>(message: &mut &'a [u8]) -> Option<(u32, Value<'a>)> {
    let (number, wire) = decode_key(message).ok()?;
    let value = match wire {
        WireType::Varint => Value::Varint(decode_varint(message).ok()?),
        WireType::SixtyFourBit => Value::Fixed64(message.try_get_u64_le().ok()?),
        WireType::ThirtyTwoBit => Value::Fixed64(message.try_get_u32_le().ok()?.into()),
        WireType::LengthDelimited => {
            let length = usize::try_from(decode_varint(message).ok()?).ok()?;
            let (value, rest) = message.split_at_checked(length)?;
            *message = rest;
            Value::Bytes(value)
        }
        WireType::StartGroup | WireType::EndGroup => return None,
    };
    Some((number, value))
}

/// Converts a duration that is not negative and in canonical form.
fn to_std_duration(duration: Option<prost_types::Duration>) -> Option<Duration> {
    let prost_types::Duration { seconds, nanos } = duration?;
    let nanos = u32::try_from(nanos).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    Some(Duration::new(u64::try_from(seconds).ok()?, nanos))
}

/// Formats a duration in its largest whole unit: `1 minute`, `3653 days`.
fn format_duration(duration: Duration) -> String {
    let units = [(86_400_000, "day"), (3_600_000, "hour"), (60_000, "minute"), (1_000, "second")];
    let millis = duration.as_millis();
    let (number, unit) = units
        .into_iter()
        .find(|(unit, _)| millis.is_multiple_of(*unit))
        .map_or((millis, "millisecond"), |(unit, name)| (millis / unit, name));
    format!("{number} {unit}{}", if number == 1 { "" } else { "s" })
}

fn with_article(noun: &str) -> String {
    let article = if noun.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {noun}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_match_the_kind_of_their_field() {
        for (name, index) in &CONTRACT.by_name {
            for field in &CONTRACT.messages[*index].fields {
                let (rule, name) = (&field.rule, format!("{name}.{}", field.name));
                let is_text = matches!(field.kind, Kind::Text);
                let is_number = matches!(field.kind, Kind::Signed | Kind::Unsigned | Kind::Double);
                let of_texts = [&rule.pattern, &rule.hint, &rule.reference, &rule.id]
                    .iter()
                    .any(|text| !text.is_empty())
                    || rule.format != 0
                    || rule.min_chars.is_some()
                    || rule.max_chars.is_some()
                    || rule.one_line
                    || rule.not_blank;
                let of_bytes = rule.min_bytes.is_some() || rule.max_bytes.is_some();
                let of_numbers = rule.min.is_some() || rule.max.is_some();
                let of_lists = rule.min_items.is_some() || rule.max_items.is_some();
                let of_durations =
                    rule.shortest.is_some() || rule.longest.is_some() || rule.or_zero;
                assert!(!of_texts || is_text, "{name}");
                assert!(!of_bytes || is_text || matches!(field.kind, Kind::Bytes), "{name}");
                assert!(!of_numbers || is_number, "{name}");
                assert!(!of_lists || field.is_list, "{name}");
                assert!(!of_durations || matches!(field.kind, Kind::Duration), "{name}");
                assert!(
                    !rule.required || !(is_number || field.is_list),
                    "{name}: `required` says nothing"
                );
                assert_eq!(rule.pattern.is_empty(), rule.hint.is_empty(), "{name}");
                assert!(Format::try_from(rule.format).is_ok(), "{name}");
                if field.name == "idempotency_key" {
                    assert_eq!(rule.format(), Format::IdempotencyKey, "{name}");
                }
                if field.name == "revision" {
                    assert_eq!(rule.min, Some(0), "{name}");
                }
            }
        }
        assert!(CONTRACT.messages.len() > 120, "{}", CONTRACT.messages.len());
    }

    #[test]
    fn durations_are_formatted_in_their_largest_whole_unit() {
        for (millis, expected) in
            [(60_000, "1 minute"), (90_000, "90 seconds"), (100, "100 milliseconds")]
        {
            assert_eq!(format_duration(Duration::from_millis(millis)), expected);
        }
        assert_eq!(format_duration(Duration::from_secs(7 * 86_400)), "7 days");
    }
}
