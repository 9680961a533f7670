//! The ways in which hosts and programs write a value.

use std::fmt::Write as _;

use base64::{
    Engine as _,
    engine::{
        GeneralPurpose,
        general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD},
    },
};

/// Every form of a value, without duplicates: as it is, in base64 (also in the middle of something
/// longer), for URLs and forms, in JSON, in HTML, in hexadecimal; all that also without white space
/// around it, which headers lose. With each, whether encoders break lines in it.
pub(super) fn of(value: &str) -> Vec<(Vec<u8>, bool)> {
    let (mut forms, mut wrapping) = (Vec::new(), Vec::new());
    for value in [value, value.trim()] {
        forms.push(value.as_bytes().to_vec());
        base64(value.as_bytes(), &mut wrapping);
        for upper in [true, false] {
            forms.push(percent(value, "-_.~", upper).into_bytes());
            forms.push(percent(value, "-_.!~*'()", upper).into_bytes());
            forms.push(percent(value, "-_.!~*'();/?:@&=+$,#", upper).into_bytes());
            forms.push(percent(value, "*-._", upper).replace("%20", "+").into_bytes());
            wrapping.push(hexadecimal(value, upper).into_bytes());
        }
        forms.extend(json(value).into_iter().chain(html(value)).map(String::into_bytes));
    }
    let wrapping = wrapping.into_iter().map(|form| (form, true));
    let mut forms: Vec<(Vec<u8>, bool)> =
        wrapping.chain(forms.into_iter().map(|form| (form, false))).collect();
    // Stable, so that of two the one that wraps stays.
    forms.sort_by(|(one, _), (other, _)| one.cmp(other));
    forms.dedup_by(|(one, _), (other, _)| one == other);
    // Nothing is stored that is so short. Were it, every text would be full of it.
    forms.retain(|(form, _)| form.len() >= construct_domain::secret::MIN_VALUE_BYTES);
    forms
}

/// Base64 in both alphabets, with and without padding; and what every base64 text contains that has
/// the value somewhere in it, for each of the three ways in which it can begin within a group of
/// three bytes.
fn base64(value: &[u8], forms: &mut Vec<Vec<u8>>) {
    let alphabets: [&GeneralPurpose; 2] = [&STANDARD_NO_PAD, &URL_SAFE_NO_PAD];
    for alphabet in alphabets {
        // How many bytes lie before it in its group, and how many characters those have a part in.
        for (before, shared) in [(0, 0), (1, 2), (2, 3)] {
            let mut bytes = vec![0; before];
            bytes.extend_from_slice(value);
            let text = alphabet.encode(&bytes);
            // The last character of an incomplete group depends on what follows.
            let depends = usize::from(!bytes.len().is_multiple_of(3));
            forms.push(text.as_bytes()[shared..text.len() - depends].to_vec());
            if before == 0 {
                let padding = "=".repeat(text.len().next_multiple_of(4) - text.len());
                forms.push(format!("{text}{padding}").into_bytes());
                forms.push(text.into_bytes());
            }
        }
    }
}

/// With `%XX` for everything but letters, digits and `plain`.
fn percent(value: &str, plain: &str, upper: bool) -> String {
    value.bytes().fold(String::new(), |mut text, byte| {
        let _ = match byte {
            _ if byte.is_ascii_alphanumeric() || plain.as_bytes().contains(&byte) => {
                text.push(char::from(byte));
                Ok(())
            }
            _ if upper => write!(text, "%{byte:02X}"),
            _ => write!(text, "%{byte:02x}"),
        };
        text
    })
}

fn hexadecimal(value: &str, upper: bool) -> String {
    value.bytes().fold(String::new(), |mut text, byte| {
        let _ = if upper { write!(text, "{byte:02X}") } else { write!(text, "{byte:02x}") };
        text
    })
}

/// As it stands between quotes in JSON, as the usual libraries write it: some escape the slash,
/// some what is not ASCII, some what means something in HTML.
fn json(value: &str) -> Vec<String> {
    let quoted = serde_json::Value::from(value).to_string();
    let plain = &quoted[1..quoted.len() - 1];
    let ascii = escaped(plain, |c| !c.is_ascii());
    let html = escaped(plain, |c| matches!(c, '<' | '>' | '&' | '\u{2028}' | '\u{2029}'));
    let more = escaped(plain, |c| matches!(c, '<' | '>' | '&' | '\'') || !c.is_ascii());
    let slash = |text: &str| text.replace('/', "\\/");
    vec![slash(plain), slash(&ascii), plain.to_owned(), ascii, html, more]
}

fn escaped(text: &str, which: fn(char) -> bool) -> String {
    text.chars().fold(String::new(), |mut text, c| {
        if which(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(text, "\\u{unit:04x}");
            }
        } else {
            text.push(c);
        }
        text
    })
}

fn html(value: &str) -> Vec<String> {
    let tags = value.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let quotes = [("&quot;", "&#39;"), ("&#34;", "&#39;"), ("&quot;", "&#x27;"), ("&quot;", "'")];
    let mut forms: Vec<String> = quotes
        .iter()
        .map(|(double, single)| tags.replace('"', double).replace('\'', single))
        .collect();
    forms.push(tags);
    forms
}
