//! What secrets look like. The shapes are those that the vendors document, a bit wider than theirs,
//! because a shape that is slightly wrong must not let a secret through.

use std::{ops::Range, sync::LazyLock};

use regex::bytes::{Captures, Regex, RegexBuilder, RegexSet, RegexSetBuilder};

use super::{files::Kind, keys::Keys};

/// A value must have so many bits a character to be taken for a secret by nothing but the name
/// before it.
const ENTROPY: f64 = 3.0;
/// So many bytes a file may grow by its marks beside doubling; from then on they are single
/// characters.
const GROWTH: usize = 1024;

/// Shapes that are secrets wherever they stand: the rule's name, and a pattern whose group `s`, or
/// whole, is the secret.
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

/// Names before a value that make it a secret.
const NAMED: &str = r#"(?ix)
    (?: passw(?:or)?d | passphrase | secret | token | api[_.-]?key | access[_.-]?key | private[_.-]?key | auth[_.-]?key
      | encryption[_.-]?key | signing[_.-]?key | client[_.-]?key | account[_.-]?key | credentials? )
    [A-Za-z0-9_.-]*
    ['"]? \s{0,3} (?: :\s{0,3}[A-Za-z&'<>\[\]]{1,20}\s{0,3}= | := | => | = | : | ,\s ) \s{0,5}
    (?: [bru]? ['"`] (?P<q> [^'"`\s]{8,} ) ['"`] | (?P<p> [A-Za-z0-9+/_.=~!@%^-]{12,} ) (?: \s | ; | , | $ ) )
"#;

/// Texts of letters only, which people choose, and which nothing tells from other words but what
/// they are given to: it ends with the name of a password or a secret.
const WORDS: &str = r#"(?ix)
    (?: passw(?:or)?d | passphrase | pwd | secret (?: [_.-]? key )? )
    [0-9]{0,3} ['"`]? \]? \s{0,3} (?: :\s{0,3}[A-Za-z&'<>\[\]?]{1,20}\s{0,3}= | := | => | = | : ) \s{0,5}
    [bru]? ['"`] (?P<q> [A-Za-z]+ (?: [_.-] [A-Za-z]+ )* ) ['"`]
"#;

/// The same without quotation marks, in files of settings ([`Kind::Settings`]): up to what ends a
/// value there. Other words may follow only after `name=value`, as in commands: after a colon that
/// is how people write, and around `=` it is a comparison.
const BARE_WORDS: &str = r#"(?ix)
    (?: passw(?:or)?d | passphrase | pwd | secret (?: [_.-]? key )? ) [0-9]{0,3}
    (?: ['"]? \s{0,3} [:=] \s{0,5} (?P<q> [A-Za-z]+ (?: [_.-] [A-Za-z]+ )* ) \s* (?: [,;&}\#] | $ )
      | = (?P<p> [A-Za-z]+ (?: [_.-] [A-Za-z]+ )* ) [\s|"')] )
"#;
/// A shorter word is none that anybody would choose, or one of no use.
const WORD: usize = 8;
/// The same of a word of few different letters, in bits a letter.
const WORD_ENTROPY: f64 = 2.25;
/// Texts that are no passwords although they are given to one: made of nothing but the words that
/// names, labels, messages and placeholders consist of, or with the name of a password or secret
/// among others, as `realmPassword`.
const NO_WORD: &str = r"(?x)
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

/// What every name in [`NAMED`] and [`WORDS`] has.
const HINT: &str = "(?i)passw|passphrase|pwd|secret|token|[_.-]?key|credential";

/// A line `NAME=value`, in files that hold nothing else; or one that was put out of use.
const ASSIGNED: &str = r#"^\s*(?:[#;]+\s*(?:export\s+|set\s+)?[A-Za-z_][A-Za-z0-9_.-]*\s*=|(?:export\s+|set\s+)?[A-Za-z_][A-Za-z0-9_.-]*\s*[=:])\s*(?P<s>\S.*?)\s*$"#;
/// Values that are no secrets in files of settings, unless their names say so.
const HARMLESS: &str = r#"^(?i)(?:true|false|yes|no|on|off|null|none|debug|info|warn(?:ing)?|error|development|production|staging|test|local|localhost|\d{1,6})$"#;
/// What is written where a secret is to be put: all of the value, as a part of it is no sign.
const PLACEHOLDER: &str = r#"(?i)^(?:[x*._-]+|<[^<>]*>|\$\{[^{}]*\}|\$?\{\{[^{}]*\}\}|%\([^()]*\)s?|\$[A-Za-z_][A-Za-z0-9_]*|[a-z_. -]*(?:example|placeholder|changeme|change[_-]me|replace|your[_-]|dummy|sample|redacted|todo|insert)[a-z_. -]*[0-9]{0,4}|(?:process\.env|os\.environ|env|config|settings|self|this|options?|args|params?|secrets|vars|var|local|data|module)\.[A-Za-z_][A-Za-z0-9_.()-]*)$"#;
/// How vendors' documents end what has the shape of a secret.
const SHOWN: &str = r"(?i)(?:x{8,}|\*{4,}|example(?:key)?)$";
/// The rules for what has no vendor's shape.
const GENERIC: [&str; 2] = ["password-in-url", "authorization-header"];

/// All rules, compiled once.
pub(super) struct Rules {
    any: RegexSet,
    shapes: Vec<(&'static str, Regex)>,
    /// A word without which `named` finds nothing; much cheaper to look for.
    hint: Regex,
    named: Regex,
    words: Regex,
    bare_words: Regex,
    no_word: Regex,
    assigned: Regex,
    harmless: Regex,
    placeholder: Regex,
    shown: Regex,
    keys: Keys,
}

impl Rules {
    /// The rules, of which there is one set.
    pub(super) fn all() -> &'static Self {
        static RULES: LazyLock<Rules> = LazyLock::new(Rules::new);
        &RULES
    }

    fn new() -> Self {
        // Secrets are ASCII; patterns that know no more are a fraction of the size.
        let build = |pattern: &str| RegexBuilder::new(pattern).unicode(false).build();
        let regex = |pattern: &str| {
            build(pattern).expect("the pattern is written in this file, and tested")
        };
        let all =
            RegexSetBuilder::new(SHAPES.iter().map(|(_, pattern)| *pattern)).unicode(false).build();
        Self {
            any: all.expect("its patterns are those below"),
            shapes: SHAPES.iter().map(|(name, pattern)| (*name, regex(pattern))).collect(),
            hint: regex(HINT),
            named: regex(NAMED),
            words: regex(WORDS),
            bare_words: regex(BARE_WORDS),
            no_word: regex(NO_WORD),
            assigned: regex(ASSIGNED),
            harmless: regex(HARMLESS),
            placeholder: regex(PLACEHOLDER),
            shown: regex(SHOWN),
            keys: Keys::new(regex),
        }
    }

    /// The content without its secrets, when it has any; each is added to `found` with its line.
    pub(super) fn mask(
        &self,
        kind: Kind,
        content: &[u8],
        found: &mut Vec<(&'static str, u32)>,
    ) -> Option<Vec<u8>> {
        // Most files hold nothing that looks like one, which is seen at once for the whole file.
        let is_ordinary = !matches!(kind, Kind::Environment | Kind::Credentials);
        let has_shapes = self.any.is_match(content);
        let has_names = kind != Kind::Lock && self.hint.is_match(content);
        let keys = self.keys.find(content);
        if is_ordinary && !has_shapes && !has_names && keys.is_empty() {
            return None;
        }
        let before = found.len();
        let mut file = File { kind, has_shapes, growth: content.len() + GROWTH, quote: None };
        let without_keys = (!keys.is_empty()).then(|| file.without_keys(content, &keys, found));
        let content = without_keys.as_deref().unwrap_or(content);
        let (mut clean, mut line_number) = (Vec::with_capacity(content.len()), 0);
        for line in content.split_inclusive(|byte| *byte == b'\n') {
            line_number += 1;
            let end = line.len()
                - line.iter().rev().take_while(|byte| matches!(byte, b'\n' | b'\r')).count();
            let (text, ending) = line.split_at(end);
            let mut hit = |rule| found.push((rule, line_number));
            let masked = self.line(&mut file, text, &mut hit);
            clean.extend_from_slice(masked.as_deref().unwrap_or(text));
            clean.extend_from_slice(ending);
        }
        (found.len() > before).then_some(clean)
    }

    fn line(
        &self,
        file: &mut File,
        text: &[u8],
        hit: &mut impl FnMut(&'static str),
    ) -> Option<Vec<u8>> {
        if matches!(file.kind, Kind::Environment | Kind::Credentials)
            && let Some(clean) = self.value(file, text, hit)
        {
            return Some(clean);
        }
        let mut clean: Option<Vec<u8>> = None;
        let shapes = file.has_shapes.then(|| self.any.matches(text));
        for index in shapes.iter().flatten() {
            let (rule, pattern) = &self.shapes[index];
            let generic = GENERIC.contains(rule);
            let wanted = |value: &[u8]| {
                !(self.shown.is_match(value) || generic && self.is_placeholder(value))
            };
            let current = clean.as_deref().unwrap_or(text);
            if let Some(changed) = replace(pattern, current, rule, file, wanted, hit) {
                clean = Some(changed);
            }
        }
        if file.kind != Kind::Lock && self.hint.is_match(text) {
            let current = clean.as_deref().unwrap_or(text);
            if let Some(changed) = replace(
                &self.named,
                current,
                "named-secret",
                file,
                |value| self.is_secret(value),
                hit,
            ) {
                clean = Some(changed);
            }
            let patterns =
                [Some(&self.words), (file.kind == Kind::Settings).then_some(&self.bare_words)];
            for pattern in patterns.into_iter().flatten() {
                let current = clean.as_deref().unwrap_or(text);
                if let Some(changed) =
                    replace(pattern, current, "password", file, |value| self.is_word(value), hit)
                {
                    clean = Some(changed);
                }
            }
        }
        clean
    }

    /// A line of a file that holds nothing but names and values.
    fn value(
        &self,
        file: &mut File,
        text: &[u8],
        hit: &mut impl FnMut(&'static str),
    ) -> Option<Vec<u8>> {
        let is_environment = file.kind == Kind::Environment;
        let rule = if is_environment { "environment-file" } else { "credentials-file" };
        if let Some(quote) = file.quote {
            // A value that began some lines above; that has its mark.
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
        let value = self.assigned.captures(text).and_then(|found| found.name("s"));
        if let Some(value) = value {
            let (from, value) = (value.start(), value.as_bytes());
            let harmless = is_environment
                && self.harmless.is_match(value)
                && !self.hint.is_match(&text[..from]);
            if harmless || matches!(value, b"''" | b"\"\"") {
                return None;
            }
            file.quote = value
                .first()
                .copied()
                .filter(|first| b"\"'`".contains(first) && !value[1..].contains(first));
            hit(rule);
            return Some([&text[..from], &file.mark(rule, value.len())].concat());
        }
        let is_comment = trimmed.starts_with(b"#") || trimmed.starts_with(b";");
        let is_section =
            trimmed.starts_with(b"[") && trimmed.ends_with(b"]") && !trimmed.contains(&b'"');
        let is_bracket = trimmed.iter().all(|byte| b"{}[](),".contains(byte));
        let is_prose = is_comment
            && !self.hint.is_match(text)
            && !text.windows(3).any(|bytes| bytes == b"://");
        if is_environment || is_section || is_bracket || is_prose {
            return None;
        }
        // `.netrc`, `.git-credentials`, `.pgpass`: no form in common, and nothing in them is for a
        // model.
        hit(rule);
        Some(file.mark(rule, text.len()))
    }

    fn is_placeholder(&self, value: &[u8]) -> bool {
        self.placeholder.is_match(value)
    }

    /// Whether a value after a telling name is a secret: not a word, a placeholder or an
    /// expression.
    fn is_secret(&self, value: &[u8]) -> bool {
        if self.is_placeholder(value) || value.starts_with(b"[masked") {
            return false;
        }
        let has = |test: fn(&u8) -> bool| value.iter().any(test);
        // Words, paths and names in code have no digits among their letters; what a machine made
        // nearly always has.
        let mixed = has(u8::is_ascii_digit) && (has(u8::is_ascii_alphabetic));
        let marked = has(|byte| b"!@#%^&*+=~".contains(byte)) && has(u8::is_ascii_alphabetic);
        (mixed || marked) && entropy(value) >= ENTROPY
    }

    /// Whether letters that are given to a password are one: not what it is called, what is to be
    /// put there, or what is said about it.
    fn is_word(&self, value: &[u8]) -> bool {
        value.len() >= WORD
            && entropy(value) >= WORD_ENTROPY
            && !self.is_placeholder(value)
            && !self.no_word.is_match(value)
    }
}

/// What is known of a file while its lines are looked at.
struct File {
    kind: Kind,
    has_shapes: bool,
    /// How much longer it may get by marks.
    growth: usize,
    /// What ends the value that began some lines above.
    quote: Option<u8>,
}

impl File {
    /// What stands in the place of a secret of `length` bytes.
    fn mark(&mut self, rule: &str, length: usize) -> Vec<u8> {
        let mark = format!("[masked: {rule}]").into_bytes();
        match self.growth.checked_sub(mark.len().saturating_sub(length)) {
            Some(left) => {
                self.growth = left;
                mark
            }
            // The line says still that there was something.
            None => b"*".to_vec(),
        }
    }

    /// The content with a mark in each key's first line, and nothing in its others.
    fn without_keys(
        &mut self,
        content: &[u8],
        keys: &[Range<usize>],
        found: &mut Vec<(&'static str, u32)>,
    ) -> Vec<u8> {
        let (mut clean, mut from, mut line) = (Vec::with_capacity(content.len()), 0, 1);
        for key in keys {
            line += lines(&content[from..key.start]);
            clean.extend_from_slice(&content[from..key.start]);
            found.push(("private-key", line));
            let mut mark = Some(self.mark("private-key", key.len()));
            for part in content[key.clone()].split_inclusive(|byte| *byte == b'\n') {
                let body = part.trim_ascii();
                // In source code the rest of the first line can be nothing but the end of a string.
                if !body.is_empty()
                    && let Some(mark) = mark.take()
                {
                    clean.extend_from_slice(&mark);
                }
                let end = part.len()
                    - part.iter().rev().take_while(|byte| matches!(byte, b'\n' | b'\r')).count();
                clean.extend_from_slice(&part[end..]);
            }
            line += lines(&content[key.clone()]);
            from = key.end;
        }
        clean.extend_from_slice(&content[from..]);
        clean
    }
}

fn lines(content: &[u8]) -> u32 {
    u32::try_from(content.iter().filter(|byte| **byte == b'\n').count()).unwrap_or(u32::MAX)
}

/// Replaces what a pattern finds, as far as it is wanted. None when nothing is.
fn replace(
    pattern: &Regex,
    text: &[u8],
    rule: &'static str,
    file: &mut File,
    wanted: impl Fn(&[u8]) -> bool,
    hit: &mut impl FnMut(&'static str),
) -> Option<Vec<u8>> {
    let (mut clean, mut from) = (Vec::new(), 0);
    for found in pattern.captures_iter(text) {
        let Some(value) = secret(&found) else { continue };
        if !wanted(value.as_bytes()) {
            continue;
        }
        hit(rule);
        clean.extend_from_slice(&text[from..value.start()]);
        clean.extend_from_slice(&file.mark(rule, value.len()));
        from = value.end();
    }
    (from > 0).then(|| {
        clean.extend_from_slice(&text[from..]);
        clean
    })
}

fn secret<'t>(found: &Captures<'t>) -> Option<regex::bytes::Match<'t>> {
    found.name("s").or_else(|| found.name("q")).or_else(|| found.name("p")).or_else(|| found.get(0))
}

/// Shannon's, in bits a byte.
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
