//! The rules for secrets. The shapes are those that vendors document, but slightly wider: an
//! inexact shape must not let a secret through.

use std::{ops::Range, sync::LazyLock};

use regex::bytes::{Captures, Regex, RegexBuilder, RegexSet, RegexSetBuilder};

use super::{files::FileKind, keys::PrivateKeys};

/// The minimum entropy, in bits per character, of a value that is masked only because of its name.
const MIN_ENTROPY: f64 = 3.0;
/// Bytes that a file may grow by marks, beyond doubling. After that, marks are single characters.
const MAX_GROWTH_BYTES: usize = 1024;

/// Shapes that are secrets anywhere: the rule's name, and a pattern whose group `s`, or whole
/// match, is the secret.
const SHAPES: &[(&str, &str)] = &[
    ("aws-access-key", r"\b(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b"),
    ("github-token", r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{50,})\b"),
    ("gitlab-token", r"\bgl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat)-[A-Za-z0-9_=-]{20,}"),
    ("slack-token", r"\bxox[abeoprs](?:\.xox[bp])?-[A-Za-z0-9-]{10,}|\bxapp-\d-[A-Za-z0-9-]{10,}"),
    (
        "slack-webhook",
        r"hooks\.slack\.com/(?P<s>(?:services|workflows|triggers)/[A-Za-z0-9+/_-]{20,})",
    ),
    ("stripe-key", r"\b(?:(?:sk|rk|pk)_(?:test|live|prod)|whsec)_[A-Za-z0-9]{10,}"),
    ("google-api-key", r"\bAIza[A-Za-z0-9_-]{35}"),
    ("google-oauth-secret", r"\b(?:GOCSPX-[A-Za-z0-9_-]{20,}|ya29\.[A-Za-z0-9_-]{20,})"),
    ("openai-key", r"\bsk-(?:proj|svcacct|admin)-[A-Za-z0-9_-]{20,}|\bsk-[A-Za-z0-9]{40,}\b"),
    ("anthropic-key", r"\bsk-ant-[A-Za-z0-9_-]{20,}"),
    ("huggingface-token", r"\bhf_[A-Za-z0-9]{30,}\b"),
    ("npm-token", r"\bnpm_[A-Za-z0-9]{36}\b"),
    ("pypi-token", r"\bpypi-[A-Za-z0-9_-]{50,}"),
    ("crates-token", r"\bcio[A-Za-z0-9]{32}\b"),
    ("sendgrid-key", r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{30,}"),
    ("twilio-key", r"\bSK[0-9a-f]{32}\b"),
    ("mailgun-key", r"\bkey-[0-9a-f]{32}\b"),
    ("digitalocean-token", r"\bdo[opr]_v1_[0-9a-f]{64}\b"),
    ("databricks-token", r"\bdapi[0-9a-f]{32}\b"),
    ("telegram-token", r"\b[0-9]{8,}:AA[A-Za-z0-9_-]{33}\b"),
    ("discord-webhook", r"discord(?:app)?\.com/api/webhooks/(?P<s>[0-9]{15,}/[A-Za-z0-9_-]{50,})"),
    ("azure-secret", r"\b[A-Za-z0-9_~.]{3}[0-9]Q~[A-Za-z0-9_~.-]{31,}"),
    ("azure-key", r"(?:AccountKey|SharedAccessKey)=(?P<s>[A-Za-z0-9+/]{40,}={0,2})"),
    ("vault-token", r"\bhv[sbr]\.[A-Za-z0-9_-]{24,}"),
    ("shopify-token", r"\bshp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}\b"),
    ("age-key", r"\bAGE-SECRET-KEY-1[A-Z0-9]{58}\b"),
    ("jwt", r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"),
    (
        "password-in-url",
        r"\b[a-z][a-z0-9+.-]*://[^\s:/?#@'\x22<>]*:(?P<s>[^\s:/?#@'\x22<>${}*]{3,})@[A-Za-z0-9\[]",
    ),
    (
        "authorization-header",
        r"(?i)\bauthorization['\x22]?\s{0,3}[:=]\s{0,3}['\x22]?(?:basic|bearer|token)\s{1,3}(?P<s>[A-Za-z0-9+/_.=~-]{16,})",
    ),
];

/// Names that make the value after them a secret.
const NAMED_SECRET: &str = r#"(?ix)
    (?: passw(?:or)?d | passphrase | secret | token | api[_.-]?key | access[_.-]?key | private[_.-]?key | auth[_.-]?key
      | encryption[_.-]?key | signing[_.-]?key | client[_.-]?key | account[_.-]?key | credentials? )
    [A-Za-z0-9_.-]*
    ['"]? \s{0,3} (?: :\s{0,3}[A-Za-z&'<>\[\]]{1,20}\s{0,3}= | := | => | = | : | ,\s ) \s{0,5}
    (?: [bru]? ['"`] (?P<q> [^'"`\s]{8,} ) ['"`] | (?P<p> [A-Za-z0-9+/_.=~!@%^-]{12,} ) (?: \s | ; | , | $ ) )
"#;

/// Passwords of letters only. Nothing but the name before them, which ends with that of a password
/// or secret, distinguishes them from other words.
const QUOTED_PASSWORD: &str = r#"(?ix)
    (?: passw(?:or)?d | passphrase | pwd | secret (?: [_.-]? key )? )
    [0-9]{0,3} ['"`]? \]? \s{0,3} (?: :\s{0,3}[A-Za-z&'<>\[\]?]{1,20}\s{0,3}= | := | => | = | : ) \s{0,5}
    [bru]? ['"`] (?P<q> [A-Za-z]+ (?: [_.-] [A-Za-z]+ )* ) ['"`]
"#;

/// Like [`QUOTED_PASSWORD`] without quotation marks, in settings ([`FileKind::Settings`]): up to
/// the end of the value there. Other words may follow only after `name=value`, as in commands.
/// After a colon that is prose, and around `=` it is a comparison.
const UNQUOTED_PASSWORD: &str = r#"(?ix)
    (?: passw(?:or)?d | passphrase | pwd | secret (?: [_.-]? key )? ) [0-9]{0,3}
    (?: ['"]? \s{0,3} [:=] \s{0,5} (?P<q> [A-Za-z]+ (?: [_.-] [A-Za-z]+ )* ) \s* (?: [,;&}\#] | $ )
      | = (?P<p> [A-Za-z]+ (?: [_.-] [A-Za-z]+ )* ) [\s|"')] )
"#;
/// The minimum length of such a password.
const MIN_PASSWORD_CHARS: usize = 8;
/// The minimum entropy of such a password, in bits per letter.
const MIN_PASSWORD_ENTROPY: f64 = 2.25;
/// Values that are no passwords: they consist only of words from names, labels, messages and
/// placeholders, or contain the name of a password or secret, as in `realmPassword`.
const NOT_A_PASSWORD: &str = r"(?x)
    ^ (?i: (?: a | account | again | allowed | an | api | arg | args | attr | attribute | auth | bad | bar | baz | bool | boolean | bytes?
      | change | char | clear | client | column | conf | config | confirm | confirmation | confirmed | contrase | correct | credentials?
      | current | data | database | db | default | disabled | email | empty | enabled | encoded | encrypted | enter | env | error | false
      | field | file | first | foo | forbidden | forgot | forgotten | form | from | generated | get | hash | hashed | haslo | help | hidden | hide | here | host
      | http | id | in | incorrect | input | insecure | invalid | is | kennwort | key | keys | label | last | local | login | mail | mandatory
      | message | missing | must | my | name | names | new | nil | no | none | not | null | of | old | optional | option | options | or
      | our | param | parameter | params | parola | pass | passord | passphrase | passwd | passwort | passwords? | path | plain | please
      | prompt | proxy | pw | pwd | random | ref | reference | repeat | required | reset | retype | right | salt | salasana | secrets? | senha | server | service
      | set | setting | settings | show | smtp | some | str | string | strong | test | testing | tests | text | that | the | this | title
      | to | token | tokens | true | type | undefined | unknown | update | url | user | username | users | valid | value | values | var
      | variable | verify | wachtwoord | weak | with | word | wrong | yes | your ) [_.-]? )+ $
    | [a-z] (?: Passw | Secret ) | [_.-] (?: [Pp]assw | [Ss]ecret ) | _ (?: PASSW | SECRET ) | ^ [Pp]assw (?: or )? d [A-Z_.-] | ^ PASSW (?: OR )? D [_.-]
";

/// A part of every name in [`NAMED_SECRET`] and [`QUOTED_PASSWORD`].
const NAME_HINT: &str = "(?i)passw|passphrase|pwd|secret|token|[_.-]?key|credential";

/// A line `NAME=value`, possibly commented out, in files that hold nothing else.
const ASSIGNMENT: &str = r#"^\s*(?:[#;]+\s*(?:export\s+|set\s+)?[A-Za-z_][A-Za-z0-9_.-]*\s*=|(?:export\s+|set\s+)?[A-Za-z_][A-Za-z0-9_.-]*\s*[=:])\s*(?P<s>\S.*?)\s*$"#;
/// Values that are no secrets in settings, unless their names say so.
const HARMLESS_VALUE: &str = r#"^(?i)(?:true|false|yes|no|on|off|null|none|debug|info|warn(?:ing)?|error|development|production|staging|test|local|localhost|\d{1,6})$"#;
/// Placeholders for a secret. They are the whole value; a part of it is no sign.
const PLACEHOLDER: &str = r#"(?i)^(?:[x*._-]+|<[^<>]*>|\$\{[^{}]*\}|\$?\{\{[^{}]*\}\}|%\([^()]*\)s?|\$[A-Za-z_][A-Za-z0-9_]*|[a-z_. -]*(?:example|placeholder|changeme|change[_-]me|replace|your[_-]|dummy|sample|redacted|todo|insert)[a-z_. -]*[0-9]{0,4}|(?:process\.env|os\.environ|env|config|settings|self|this|options?|args|params?|secrets|vars|var|local|data|module)\.[A-Za-z_][A-Za-z0-9_.()-]*)$"#;
/// The suffixes of example secrets in vendors' documentation.
const EXAMPLE_SUFFIX: &str = r"(?i)(?:x{8,}|\*{4,}|example(?:key)?)$";
/// The rules without a vendor's shape.
const GENERIC_RULES: [&str; 2] = ["password-in-url", "authorization-header"];

/// All rules, compiled once.
pub(super) struct Rules {
    any: RegexSet,
    shapes: Vec<(&'static str, Regex)>,
    /// A word that every match of `named_secret` contains; much cheaper to search for.
    name_hint: Regex,
    named_secret: Regex,
    quoted_password: Regex,
    unquoted_password: Regex,
    not_a_password: Regex,
    assignment: Regex,
    harmless_value: Regex,
    placeholder: Regex,
    example_suffix: Regex,
    keys: PrivateKeys,
}

impl Rules {
    /// Returns the rules, which are compiled once.
    pub(super) fn all() -> &'static Self {
        static RULES: LazyLock<Rules> = LazyLock::new(Rules::new);
        &RULES
    }

    fn new() -> Self {
        // Secrets are ASCII; ASCII patterns are a fraction of the size.
        let build = |pattern: &str| RegexBuilder::new(pattern).unicode(false).build();
        let regex = |pattern: &str| {
            build(pattern).expect("the pattern is written in this file, and tested")
        };
        let all =
            RegexSetBuilder::new(SHAPES.iter().map(|(_, pattern)| *pattern)).unicode(false).build();
        Self {
            any: all.expect("its patterns are those below"),
            shapes: SHAPES.iter().map(|(name, pattern)| (*name, regex(pattern))).collect(),
            name_hint: regex(NAME_HINT),
            named_secret: regex(NAMED_SECRET),
            quoted_password: regex(QUOTED_PASSWORD),
            unquoted_password: regex(UNQUOTED_PASSWORD),
            not_a_password: regex(NOT_A_PASSWORD),
            assignment: regex(ASSIGNMENT),
            harmless_value: regex(HARMLESS_VALUE),
            placeholder: regex(PLACEHOLDER),
            example_suffix: regex(EXAMPLE_SUFFIX),
            keys: PrivateKeys::new(regex),
        }
    }

    /// Returns the masked content, if it has secrets; adds each with its line to `found`.
    pub(super) fn mask(
        &self,
        kind: FileKind,
        content: &[u8],
        found: &mut Vec<(&'static str, u32)>,
    ) -> Option<Vec<u8>> {
        // Most files have no candidate, which one search of the whole file shows.
        let is_ordinary = !matches!(kind, FileKind::Environment | FileKind::Credentials);
        let has_shapes = self.any.is_match(content);
        let has_names = kind != FileKind::Lock && self.name_hint.is_match(content);
        let keys = self.keys.find(content);
        if is_ordinary && !has_shapes && !has_names && keys.is_empty() {
            return None;
        }
        let before = found.len();
        let mut file =
            FileState { kind, has_shapes, growth: content.len() + MAX_GROWTH_BYTES, quote: None };
        let without_keys = (!keys.is_empty()).then(|| file.without_keys(content, &keys, found));
        let content = without_keys.as_deref().unwrap_or(content);
        let (mut masked, mut line_number) = (Vec::with_capacity(content.len()), 0);
        for line in content.split_inclusive(|byte| *byte == b'\n') {
            line_number += 1;
            let end = line.len()
                - line.iter().rev().take_while(|byte| matches!(byte, b'\n' | b'\r')).count();
            let (text, ending) = line.split_at(end);
            let mut hit = |rule| found.push((rule, line_number));
            let masked_line = self.mask_line(&mut file, text, &mut hit);
            masked.extend_from_slice(masked_line.as_deref().unwrap_or(text));
            masked.extend_from_slice(ending);
        }
        (found.len() > before).then_some(masked)
    }

    fn mask_line(
        &self,
        file: &mut FileState,
        text: &[u8],
        hit: &mut impl FnMut(&'static str),
    ) -> Option<Vec<u8>> {
        if matches!(file.kind, FileKind::Environment | FileKind::Credentials)
            && let Some(masked) = self.mask_value(file, text, hit)
        {
            return Some(masked);
        }
        let mut masked: Option<Vec<u8>> = None;
        let shapes = file.has_shapes.then(|| self.any.matches(text));
        for index in shapes.iter().flatten() {
            let (rule, pattern) = &self.shapes[index];
            let generic = GENERIC_RULES.contains(rule);
            let accept = |value: &[u8]| {
                !(self.example_suffix.is_match(value) || generic && self.is_placeholder(value))
            };
            let current = masked.as_deref().unwrap_or(text);
            if let Some(changed) = replace_matches(pattern, current, rule, file, accept, hit) {
                masked = Some(changed);
            }
        }
        if file.kind != FileKind::Lock && self.name_hint.is_match(text) {
            let current = masked.as_deref().unwrap_or(text);
            if let Some(changed) = replace_matches(
                &self.named_secret,
                current,
                "named-secret",
                file,
                |value| self.is_secret(value),
                hit,
            ) {
                masked = Some(changed);
            }
            let patterns = [
                Some(&self.quoted_password),
                (file.kind == FileKind::Settings).then_some(&self.unquoted_password),
            ];
            for pattern in patterns.into_iter().flatten() {
                let current = masked.as_deref().unwrap_or(text);
                if let Some(changed) = replace_matches(
                    pattern,
                    current,
                    "password",
                    file,
                    |value| self.is_password(value),
                    hit,
                ) {
                    masked = Some(changed);
                }
            }
        }
        masked
    }

    /// Masks a line of a file that holds only names and values.
    fn mask_value(
        &self,
        file: &mut FileState,
        text: &[u8],
        hit: &mut impl FnMut(&'static str),
    ) -> Option<Vec<u8>> {
        let is_environment = file.kind == FileKind::Environment;
        let rule = if is_environment { "environment-file" } else { "credentials-file" };
        if let Some(quote) = file.quote {
            // A value that started on an earlier line, which has its mark.
            if text.contains(&quote) {
                file.quote = None;
            }
            hit(rule);
            return Some(Vec::new());
        }
        let trimmed = text.trim_ascii();
        if trimmed.is_empty() {
            return None;
        }
        let value = self.assignment.captures(text).and_then(|found| found.name("s"));
        if let Some(value) = value {
            let (from, value) = (value.start(), value.as_bytes());
            let harmless = is_environment
                && self.harmless_value.is_match(value)
                && !self.name_hint.is_match(&text[..from]);
            if harmless || matches!(value, b"''" | b"\"\"") {
                return None;
            }
            file.quote = value
                .first()
                .copied()
                .filter(|first| b"\"'`".contains(first) && !value[1..].contains(first));
            hit(rule);
            return Some([&text[..from], &file.next_mark(rule, value.len())].concat());
        }
        let is_comment = trimmed.starts_with(b"#") || trimmed.starts_with(b";");
        let is_section =
            trimmed.starts_with(b"[") && trimmed.ends_with(b"]") && !trimmed.contains(&b'"');
        let is_bracket = trimmed.iter().all(|byte| b"{}[](),".contains(byte));
        let is_prose = is_comment
            && !self.name_hint.is_match(text)
            && !text.windows(3).any(|bytes| bytes == b"://");
        if is_environment || is_section || is_bracket || is_prose {
            return None;
        }
        // `.netrc`, `.git-credentials`, `.pgpass`: they have no common form, and no content for a
        // model.
        hit(rule);
        Some(file.next_mark(rule, text.len()))
    }

    fn is_placeholder(&self, value: &[u8]) -> bool {
        self.placeholder.is_match(value)
    }

    /// Whether a value after a secret's name is a secret: no word, placeholder or expression.
    fn is_secret(&self, value: &[u8]) -> bool {
        if self.is_placeholder(value) || value.starts_with(b"[masked") {
            return false;
        }
        let has = |test: fn(&u8) -> bool| value.iter().any(test);
        // Words, paths and identifiers have no digits among their letters; generated values nearly
        // always have.
        let mixed = has(u8::is_ascii_digit) && (has(u8::is_ascii_alphabetic));
        let marked = has(|byte| b"!@#%^&*+=~".contains(byte)) && has(u8::is_ascii_alphabetic);
        (mixed || marked) && entropy(value) >= MIN_ENTROPY
    }

    /// Whether letters after a password's name are one: no name, placeholder or message.
    fn is_password(&self, value: &[u8]) -> bool {
        value.len() >= MIN_PASSWORD_CHARS
            && entropy(value) >= MIN_PASSWORD_ENTROPY
            && !self.is_placeholder(value)
            && !self.not_a_password.is_match(value)
    }
}

/// The state while the lines of a file are masked.
struct FileState {
    kind: FileKind,
    has_shapes: bool,
    /// How many bytes marks may still add.
    growth: usize,
    /// The quotation mark that ends a value of an earlier line.
    quote: Option<u8>,
}

impl FileState {
    /// Returns the mark for a secret of `length` bytes.
    fn next_mark(&mut self, rule: &str, length: usize) -> Vec<u8> {
        let mark = format!("[masked: {rule}]").into_bytes();
        match self.growth.checked_sub(mark.len().saturating_sub(length)) {
            Some(left) => {
                self.growth = left;
                mark
            }
            // The line still shows that there was something.
            None => b"*".to_vec(),
        }
    }

    /// Returns the content with a mark in the first line of each key, and nothing in its other
    /// lines.
    fn without_keys(
        &mut self,
        content: &[u8],
        keys: &[Range<usize>],
        found: &mut Vec<(&'static str, u32)>,
    ) -> Vec<u8> {
        let (mut masked, mut from, mut line) = (Vec::with_capacity(content.len()), 0, 1);
        for key in keys {
            line += count_lines(&content[from..key.start]);
            masked.extend_from_slice(&content[from..key.start]);
            found.push(("private-key", line));
            let mut mark = Some(self.next_mark("private-key", key.len()));
            for part in content[key.clone()].split_inclusive(|byte| *byte == b'\n') {
                let body = part.trim_ascii();
                // In source code, the rest of the first line can be just the end of a string.
                if !body.is_empty()
                    && let Some(mark) = mark.take()
                {
                    masked.extend_from_slice(&mark);
                }
                let end = part.len()
                    - part.iter().rev().take_while(|byte| matches!(byte, b'\n' | b'\r')).count();
                masked.extend_from_slice(&part[end..]);
            }
            line += count_lines(&content[key.clone()]);
            from = key.end;
        }
        masked.extend_from_slice(&content[from..]);
        masked
    }
}

fn count_lines(content: &[u8]) -> u32 {
    u32::try_from(content.iter().filter(|byte| **byte == b'\n').count()).unwrap_or(u32::MAX)
}

/// Replaces the accepted matches of a pattern. None when there are none.
fn replace_matches(
    pattern: &Regex,
    text: &[u8],
    rule: &'static str,
    file: &mut FileState,
    accept: impl Fn(&[u8]) -> bool,
    hit: &mut impl FnMut(&'static str),
) -> Option<Vec<u8>> {
    let (mut masked, mut from) = (Vec::new(), 0);
    for found in pattern.captures_iter(text) {
        let Some(value) = secret_group(&found) else { continue };
        if !accept(value.as_bytes()) {
            continue;
        }
        hit(rule);
        masked.extend_from_slice(&text[from..value.start()]);
        masked.extend_from_slice(&file.next_mark(rule, value.len()));
        from = value.end();
    }
    (from > 0).then(|| {
        masked.extend_from_slice(&text[from..]);
        masked
    })
}

fn secret_group<'t>(found: &Captures<'t>) -> Option<regex::bytes::Match<'t>> {
    found.name("s").or_else(|| found.name("q")).or_else(|| found.name("p")).or_else(|| found.get(0))
}

/// Shannon's entropy, in bits per byte.
fn entropy(value: &[u8]) -> f64 {
    let mut counts = [0_u32; 256];
    for byte in value {
        counts[usize::from(*byte)] += 1;
    }
    let length = f64::from(u32::try_from(value.len()).unwrap_or(u32::MAX));
    counts
        .iter()
        .filter(|count| **count > 0)
        .map(|count| f64::from(*count) / length)
        .map(|p| -p * p.log2())
        .sum()
}
