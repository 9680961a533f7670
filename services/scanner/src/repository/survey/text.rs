//! Reads source code by lines, without a parser. This suffices to find a command's arguments, and
//! errors are limited to a wrong word.

/// Lines of a statement.
const MAX_LINES: usize = 40;

/// The statement that starts at a line, up to its closing brackets; and its number of lines.
pub(super) fn statement_at(lines: &[&str], from: usize) -> (String, usize) {
    let (mut depth, mut text, mut count) = (0_i32, String::new(), 0);
    for line in lines.iter().skip(from).take(MAX_LINES) {
        count += 1;
        text.push_str(line.trim());
        text.push(' ');
        let mut quote = None;
        let mut escaped = false;
        for c in line.chars() {
            if escaped {
                escaped = false;
                continue;
            }
            match (quote, c) {
                (Some(_), '\\') => escaped = true,
                (Some(open), c) if c == open => quote = None,
                (Some(_), _) => {}
                (None, '"' | '\'' | '`') => quote = Some(c),
                (None, '(' | '[' | '{') => depth += 1,
                (None, ')' | ']' | '}') => depth -= 1,
                (None, _) => {}
            }
        }
        if depth <= 0 {
            break;
        }
    }
    (text, count.max(1))
}

/// The string literals of a text, with their ranges, quotes included.
pub(super) fn string_literals(text: &str) -> Vec<(usize, usize, String)> {
    let mut found = Vec::new();
    let mut open: Option<(char, usize, String)> = None;
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match &mut open {
            None if matches!(c, '"' | '\'' | '`') => open = Some((c, at, String::new())),
            None => {}
            Some((_, _, literal)) if escaped => {
                literal.push(if c == 'n' { ' ' } else { c });
                escaped = false;
            }
            Some(_) if c == '\\' => escaped = true,
            Some((quote, start, literal)) if c == *quote => {
                found.push((*start, at + 1, std::mem::take(literal)));
                open = None;
            }
            Some((_, _, literal)) => literal.push(c),
        }
    }
    // Python's `"""text"""` and `"a" "b"` result in adjacent literals, which belong together.
    found.retain(|(_, _, literal): &(usize, usize, String)| !literal.is_empty());
    found
}

/// The first string literal after a word such as `help=`, joined with those that directly follow.
pub(super) fn literal_after(text: &str, words: &[&str]) -> Option<String> {
    let at = words.iter().filter_map(|word| text.find(word).map(|at| at + word.len())).min()?;
    let rest = &text[at..];
    let literals = string_literals(rest);
    let (start, mut end, first) = literals.first()?.clone();
    if !rest[..start]
        .trim_matches(|c: char| c.is_whitespace() || "(=:rbf\"'".contains(c))
        .is_empty()
    {
        return None;
    }
    let mut whole = first;
    for (start, next, more) in &literals[1..] {
        if !rest[end..*start].trim().is_empty() {
            break;
        }
        whole.push_str(more);
        end = *next;
    }
    Some(whole)
}

/// The literals at the beginning of a call, before anything else: `"-o", "--out"`.
pub(super) fn leading_literals(text: &str, call: &str) -> Vec<String> {
    let Some(at) = text.find(call) else { return Vec::new() };
    let rest = &text[at + call.len()..];
    let (mut end, mut found) = (0, Vec::new());
    for (start, next, literal) in string_literals(rest) {
        if !rest[end..start]
            .trim_matches(|c: char| c.is_whitespace() || ",([rbfu\"'".contains(c))
            .is_empty()
        {
            break;
        }
        found.push(literal);
        end = next;
    }
    found
}

/// The parameters of a function, with types and defaults, as written.
pub(super) fn function_parameters(text: &str) -> Vec<String> {
    let Some(open) = text.find('(') else { return Vec::new() };
    let (mut depth, mut found, mut current) = (0, Vec::new(), String::new());
    for c in text[open + 1..].chars() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if depth == 0 => break,
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(std::mem::take(&mut current));
                continue;
            }
            _ => {}
        }
        current.push(c);
    }
    found.push(current);
    found
        .into_iter()
        .map(|parameter| parameter.trim().to_owned())
        .filter(|parameter| !parameter.is_empty() && parameter != "self" && parameter != "*")
        .collect()
}

/// The text of the comment lines directly above a line, without their marks.
pub(super) fn comment_above(lines: &[&str], index: usize, marks: &[&str]) -> Option<String> {
    let stripped = |line: &str| {
        marks
            .iter()
            .find_map(|mark| line.trim().strip_prefix(mark).map(|text| text.trim().to_owned()))
    };
    let mut found: Vec<String> = lines[..index]
        .iter()
        .rev()
        .take(20)
        .map_while(|line| stripped(line))
        .filter(|line| !line.starts_with('!'))
        .collect();
    found.reverse();
    let text = found.join(" ");
    (!text.trim().is_empty()).then_some(text)
}
