//! Holds requests against the contract's option `rule`.
//!
//! A request is walked in its encoded form, in which every field stands that is given. So no second
//! copy of it is made, and an entry of a list beyond the list's limit is not looked at.

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

/// Reports what is wrong with an encoded message of the type with this full name, which has to be a
/// request of the contract.
pub(super) fn check(name: &str, message: &[u8], violations: &mut Violations) {
    CONTRACT.check(CONTRACT.by_name[name], message, None, violations);
}

/// The rules of every message that a request is made of.
#[derive(Default)]
struct Contract {
    messages: Vec<MessageRules>,
    by_name: HashMap<String, usize>,
}

#[derive(Default)]
struct MessageRules {
    /// By number.
    fields: Vec<FieldRules>,
    /// Groups of fields, as places in `fields`: one of each group must be given.
    required_oneofs: Vec<Vec<usize>>,
}

struct FieldRules {
    number: u32,
    name: String,
    kind: Kind,
    is_list: bool,
    /// It is told apart whether it is empty or not given.
    has_presence: bool,
    /// Nothing is said of its value, not even its length.
    is_redacted: bool,
    rule: FieldRule,
    pattern: Option<Regex>,
    id: Option<id::Kind>,
}

/// What the value of a field is checked as.
enum Kind {
    Text,
    Bytes,
    Signed,
    Unsigned,
    Double,
    Enum(EnumDescriptor),
    Time,
    Duration,
    /// A place in [`Contract::messages`].
    Message(usize),
    Unchecked,
}

/// A field's value as it is encoded.
#[derive(Clone, Copy)]
enum Value<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'a [u8]),
}

/// Where a value stands in a request, e.g. `spec.fallbacks[0].model`.
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

    /// The place of a message's rules, which are added unless they are there.
    fn add(&mut self, message: &MessageDescriptor) -> usize {
        if let Some(place) = self.by_name.get(message.full_name()) {
            return *place;
        }
        let place = self.messages.len();
        // Known before its fields are read: a message may be within itself.
        self.messages.push(MessageRules::default());
        self.by_name.insert(message.full_name().to_owned(), place);
        let mut fields: Vec<_> = message.fields().map(|field| self.field(&field)).collect();
        fields.sort_by_key(|field| field.number);
        let required = message.oneofs().filter(options::is_one_required);
        let member =
            |field: FieldDescriptor| fields.iter().position(|known| known.number == field.number());
        let required_oneofs =
            required.map(|oneof| oneof.fields().filter_map(member).collect()).collect();
        self.messages[place] = MessageRules { fields, required_oneofs };
        place
    }

    fn field(&mut self, field: &FieldDescriptor) -> FieldRules {
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
        // What doesn't fit is a mistake in the contract, which a test finds.
        let pattern = (!rule.pattern.is_empty())
            .then(|| Regex::new(&rule.pattern).expect("a regular expression"));
        let id = (!rule.id.is_empty())
            .then(|| id::Kind::with_prefix(&rule.id).expect("a prefix of ids"));
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
        place: usize,
        mut message: &[u8],
        parent: Option<&Path<'_>>,
        violations: &mut Violations,
    ) {
        let MessageRules { fields, required_oneofs } = &self.messages[place];
        // How often each field is given.
        let mut counts = vec![0_usize; fields.len()];
        while message.has_remaining() {
            // It was encoded in this process, so it can be read to its end.
            let Some((number, value)) = next(&mut message) else { return };
            let Ok(index) = fields.binary_search_by_key(&number, |field| field.number) else {
                continue;
            };
            let field = &fields[index];
            for value in field.values(value) {
                let entry = counts[index];
                counts[index] += 1;
                if field.is_list && field.rule.max_items.is_some_and(|most| entry >= most as usize)
                {
                    continue;
                }
                let path =
                    Path { parent, name: &field.name, entry: field.is_list.then_some(entry) };
                match field.kind {
                    Kind::Message(place) => {
                        if let Value::Bytes(message) = value {
                            self.check(place, message, Some(&path), violations);
                        }
                    }
                    _ => field.check(value, &path, violations),
                }
            }
        }
        for (field, count) in fields.iter().zip(&counts) {
            let path = Path { parent, name: &field.name, entry: None };
            if field.is_list {
                field.length(
                    &path,
                    "entries",
                    *count,
                    (field.rule.min_items, field.rule.max_items),
                    violations,
                );
            } else if *count == 0 {
                field.absent(&path, violations);
                if let Kind::Message(place) = field.kind
                    && field.rule.required
                {
                    self.check(place, &[], Some(&path), violations);
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
    /// The values in what stands in one place: several numbers may be packed.
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

    /// Checks a value that is given, and is no message with rules of its own.
    fn check(&self, value: Value<'_>, path: &Path<'_>, violations: &mut Violations) {
        match (&self.kind, value) {
            (Kind::Text, Value::Bytes(bytes)) => {
                if let Ok(text) = std::str::from_utf8(bytes) {
                    self.text(text, path, violations);
                }
            }
            (Kind::Bytes, Value::Bytes(bytes)) => {
                self.length(
                    path,
                    "bytes",
                    bytes.len(),
                    (self.rule.min_bytes, self.rule.max_bytes),
                    violations,
                );
            }
            (Kind::Signed, Value::Varint(value)) => {
                self.number(i128::from(value as i64), path, violations)
            }
            (Kind::Unsigned, Value::Varint(value)) => {
                self.number(i128::from(value), path, violations)
            }
            (Kind::Double, Value::Fixed64(bits)) => {
                self.double(f64::from_bits(bits), path, violations)
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
                self.duration(
                    prost_types::Duration::decode(bytes).unwrap_or_default(),
                    path,
                    violations,
                );
            }
            _ => {}
        }
    }

    /// Checks a field that is not given.
    fn absent(&self, path: &Path<'_>, violations: &mut Violations) {
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
                Kind::Signed | Kind::Unsigned => self.number(0, path, violations),
                Kind::Double => self.double(0.0, path, violations),
                _ => {}
            }
        }
    }

    fn text(&self, text: &str, path: &Path<'_>, violations: &mut Violations) {
        let (rule, before) = (&self.rule, violations.len());
        if !rule.reference.is_empty() {
            let is_name = match rule.reference.as_str() {
                "secret" => {
                    secret::is_name(text) || text.parse::<construct_domain::SecretId>().is_ok()
                }
                // Ids of everything else have the form of a name.
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
        if let Some(words) =
            Format::try_from(rule.format).ok().and_then(|format| formats::violation(format, text))
        {
            violations.add(path.to_string(), words);
        }
        if let Some(pattern) = &self.pattern {
            violations.require(pattern.is_match(text), path, || rule.hint.clone());
        }
        if rule.min_chars.is_some() || rule.max_chars.is_some() {
            let count = text.chars().count();
            self.length(path, "characters", count, (rule.min_chars, rule.max_chars), violations);
        }
        self.length(path, "bytes", text.len(), (rule.min_bytes, rule.max_bytes), violations);
        let is_line = !rule.one_line || !text.chars().any(char::is_control);
        violations.require(is_line, path, || "must be one line, with no control characters".into());
        let is_blank = rule.not_blank && text.trim().is_empty();
        violations.require(!is_blank, path, || "must not be blank".into());
        // PostgreSQL stores no U+0000, neither in text nor in JSON.
        if violations.len() == before {
            violations.require(!text.contains('\0'), path, || {
                "must not contain the character U+0000".into()
            });
        }
    }

    /// How many there are of something, held against a least and a most.
    fn length(
        &self,
        path: &Path<'_>,
        what: &str,
        count: usize,
        (least, most): (Option<u32>, Option<u32>),
        violations: &mut Violations,
    ) {
        let is_within = least.is_none_or(|least| count >= least as usize)
            && most.is_none_or(|most| count <= most as usize);
        violations.require(is_within, path, || {
            let number = |number: Option<u32>| thousands(number.unwrap_or_default() as usize);
            let bounds = match (least.filter(|least| *least > 0), most) {
                (None, _) => format!("at most {}", number(most)),
                (Some(_), None) => format!("at least {}", number(least)),
                (Some(_), Some(_)) => format!("{} to {}", number(least), number(most)),
            };
            let has = if self.is_redacted {
                String::new()
            } else {
                format!(", has {}", thousands(count))
            };
            format!("must have {bounds} {what}{has}")
        });
    }

    fn number(&self, value: i128, path: &Path<'_>, violations: &mut Violations) {
        let (least, most) = (self.rule.min.map(i128::from), self.rule.max.map(i128::from));
        let is_within =
            least.is_none_or(|least| value >= least) && most.is_none_or(|most| value <= most);
        violations.require(is_within, path, || self.bounds(&value));
    }

    fn double(&self, value: f64, path: &Path<'_>, violations: &mut Violations) {
        let (least, most) =
            (self.rule.min.map(|least| least as f64), self.rule.max.map(|most| most as f64));
        if !value.is_finite() {
            return violations.add(path.to_string(), "must be a finite number");
        }
        let is_within =
            least.is_none_or(|least| value >= least) && most.is_none_or(|most| value <= most);
        violations.require(is_within, path, || self.bounds(&value));
    }

    /// What a number must be that is `value`.
    fn bounds(&self, value: &dyn Display) -> String {
        let least = self.rule.min.or(matches!(self.kind, Kind::Unsigned).then_some(0));
        match (least, self.rule.max) {
            (Some(least), Some(most)) => format!("must be between {least} and {most}, is {value}"),
            (Some(0), None) => format!("must not be negative, is {value}"),
            (Some(least), None) => format!("must be at least {least}, is {value}"),
            (None, most) => format!("must be at most {}, is {value}", most.unwrap_or_default()),
        }
    }

    fn duration(&self, value: prost_types::Duration, path: &Path<'_>, violations: &mut Violations) {
        let (shortest, longest) = (exact(self.rule.shortest), exact(self.rule.longest));
        let is_within = exact(Some(value)).is_some_and(|value| {
            let is_bounded = shortest.is_none_or(|shortest| value >= shortest)
                && longest.is_none_or(|longest| value <= longest);
            is_bounded || self.rule.or_zero && value.is_zero()
        });
        violations.require(is_within, path, || {
            let zero = if self.rule.or_zero { "0, or " } else { "" };
            match (shortest, longest) {
                (Some(shortest), Some(longest)) => {
                    format!("must be {zero}{} to {}", spoken(shortest), spoken(longest))
                }
                _ => "is not a valid duration".to_owned(),
            }
        });
    }
}

/// The next field of a message: its number, and what stands there.
fn next<'a>(message: &mut &'a [u8]) -> Option<(u32, Value<'a>)> {
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

/// A duration that is not negative and is written in one way only.
fn exact(duration: Option<prost_types::Duration>) -> Option<Duration> {
    let prost_types::Duration { seconds, nanos } = duration?;
    let nanos = u32::try_from(nanos).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    Some(Duration::new(u64::try_from(seconds).ok()?, nanos))
}

/// A duration in its largest whole unit: `1 minute`, `3653 days`.
fn spoken(duration: Duration) -> String {
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
    fn rules_are_of_the_kind_of_their_field() {
        for (name, place) in &CONTRACT.by_name {
            for field in &CONTRACT.messages[*place].fields {
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
    fn durations_are_spoken_in_their_largest_whole_unit() {
        for (millis, expected) in
            [(60_000, "1 minute"), (90_000, "90 seconds"), (100, "100 milliseconds")]
        {
            assert_eq!(spoken(Duration::from_millis(millis)), expected);
        }
        assert_eq!(spoken(Duration::from_secs(7 * 86_400)), "7 days");
    }
}
