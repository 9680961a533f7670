//! Enums become the object they define, on the same lines.
//!
//! `enum E { A, B = A << 1 }` becomes `var E = ((E) => { E[E["A"] = 0] = "A"; E[E["B"] = 0] = "B";
//! return E; })(E || {});`

use std::fmt::Write as _;

use oxc_ast::ast::{
    BinaryExpression, Expression, IdentifierReference, TSEnumDeclaration, TSEnumMember,
    TSEnumMemberName, TemplateLiteral,
};
use oxc_ast_visit::Visit;
use oxc_span::GetSpan;
use oxc_syntax::operator::{BinaryOperator, UnaryOperator};

use super::Eraser;

/// A member's value, if it is known without running anything.
#[derive(Clone, Debug, PartialEq)]
enum Constant {
    Number(f64),
    Text(String),
}

/// A member: its name, and its value if that is constant.
type Member = (String, Option<Constant>);

/// A declared enum.
pub(super) struct DeclaredEnum {
    name: String,
    members: Vec<Member>,
}

/// An enum whose initializers are being read.
pub(super) struct OpenEnum {
    name: String,
    members: Vec<Member>,
}

impl Eraser<'_> {
    /// Rewrites an enum. `exported` is the position of its `export`.
    pub(super) fn enumeration(&mut self, it: &TSEnumDeclaration<'_>, exported: Option<u32>) {
        let name = it.id.name.as_str();
        if self.is_module {
            self.bound.insert(name.to_owned());
        }
        let top = self.lists.len() <= 1;
        let earlier = self.lists.last_mut().and_then(|list| {
            let position = list.iter().position(|declared| declared.name == name)?;
            Some(list.remove(position))
        });
        let start = exported.unwrap_or(it.span.start);
        let export = if exported.is_some() && earlier.is_none() { "export " } else { "" };
        // Later declarations with the same name add to the first.
        let (head, tail) = match (&earlier, top) {
            (None, true) => (
                format!("{export}var {name} = (({name}) => {{"),
                format!("return {name}; }})({name} || {{}});"),
            ),
            (None, false) => {
                (format!("let {name} = (({name}) => {{"), format!("return {name}; }})({{}});"))
            }
            (Some(_), _) => (format!(";(({name}) => {{"), format!("}})({name});")),
        };
        self.edits.replace(start, it.body.span.start + 1, head);
        self.enums.push(OpenEnum {
            name: name.to_owned(),
            members: earlier.map(|declared| declared.members).unwrap_or_default(),
        });
        let mut next = Some(0.0);
        for member in &it.body.members {
            next = self.member(name, member, next);
        }
        if let Some(OpenEnum { name, members }) = self.enums.pop()
            && let Some(list) = self.lists.last_mut()
        {
            list.push(DeclaredEnum { name, members });
        }
        self.edits.replace(it.body.span.end - 1, it.body.span.end, tail);
    }

    /// Rewrites a member; returns the value of the next one if that has none of its own.
    fn member(&mut self, name: &str, member: &TSEnumMember<'_>, next: Option<f64>) -> Option<f64> {
        let (key, id) = match &member.id {
            TSEnumMemberName::Identifier(it) => (it.name.to_string(), it.span),
            TSEnumMemberName::String(it) | TSEnumMemberName::ComputedString(it) => {
                (it.value.to_string(), it.span)
            }
            TSEnumMemberName::ComputedTemplateString(it) => {
                (plain_text(it).unwrap_or_default(), it.span)
            }
        };
        // A computed name is inside brackets.
        let id_start = member.span.start;
        let id_end = match &member.id {
            TSEnumMemberName::Identifier(_) | TSEnumMemberName::String(_) => id.end,
            _ => {
                let close = self.token_from(id.end);
                self.tokens.get(close).map_or(id.end, |token| token.end())
            }
        };
        let quoted = quote(&key);
        let constant = match &member.initializer {
            None => next.map(Constant::Number),
            Some(initializer) => self.evaluate(initializer),
        };
        match &member.initializer {
            None => match next {
                Some(value) => {
                    let value = number(value);
                    self.edits.replace(id_start, id_end, format!("{name}[{name}[{quoted}] = {value}] = {quoted}"));
                }
                None => self.fail(
                    member.span,
                    format!("the enum member {key} needs a value: the one before it is not a constant number"),
                ),
            },
            Some(initializer) => {
                let text = match &constant {
                    Some(Constant::Text(_)) => true,
                    Some(Constant::Number(_)) => false,
                    None => is_text(initializer),
                };
                let end = initializer.span().end;
                self.visit_expression(initializer);
                if text {
                    self.edits.replace(id_start, id_end, format!("{name}[{quoted}]"));
                } else {
                    self.edits.replace(id_start, id_end, format!("{name}[{name}[{quoted}]"));
                    self.edits.insert(end, format!("] = {quoted}"));
                }
            }
        }
        let end = member.span.end;
        let comma = self.token_from(end);
        if self.token_text(comma) == "," {
            self.edits.put(self.tokens[comma].start(), b';');
        } else {
            self.edits.insert(end, ";");
        }
        let next = match &constant {
            Some(Constant::Number(value)) => Some(value + 1.0),
            _ => None,
        };
        if let Some(scope) = self.enums.last_mut() {
            scope.members.push((key, constant));
        }
        next
    }

    /// In an initializer, the name of a member refers to that member: `A` becomes `E.A`.
    pub(super) fn qualify_member(&mut self, it: &IdentifierReference<'_>) {
        let scope = self
            .enums
            .iter()
            .rev()
            .find(|scope| scope.members.iter().any(|(name, _)| *name == it.name.as_str()));
        if let Some(scope) = scope {
            let qualifier = format!("{}.", scope.name);
            self.edits.insert(it.span.start, qualifier);
        }
    }

    /// The value of a constant initializer.
    fn evaluate(&self, expression: &Expression<'_>) -> Option<Constant> {
        use Constant::{Number, Text};
        match expression {
            Expression::NumericLiteral(it) => Some(Number(it.value)),
            Expression::StringLiteral(it) => Some(Text(it.value.to_string())),
            Expression::TemplateLiteral(it) => {
                let mut text = String::new();
                for (index, quasi) in it.quasis.iter().enumerate() {
                    text.push_str(quasi.value.cooked.as_ref()?.as_str());
                    if let Some(expression) = it.expressions.get(index) {
                        match self.evaluate(expression)? {
                            Number(value) => text.push_str(&number(value)),
                            Text(value) => text.push_str(&value),
                        }
                    }
                }
                Some(Text(text))
            }
            Expression::ParenthesizedExpression(it) => self.evaluate(&it.expression),
            Expression::TSAsExpression(it) => self.evaluate(&it.expression),
            Expression::TSSatisfiesExpression(it) => self.evaluate(&it.expression),
            Expression::UnaryExpression(it) => match (it.operator, self.evaluate(&it.argument)?) {
                (UnaryOperator::UnaryPlus, Number(value)) => Some(Number(value)),
                (UnaryOperator::UnaryNegation, Number(value)) => Some(Number(-value)),
                (UnaryOperator::BitwiseNot, Number(value)) => {
                    Some(Number(f64::from(!to_int32(value))))
                }
                _ => None,
            },
            Expression::BinaryExpression(it) => self.evaluate_binary(it),
            Expression::Identifier(it) => match it.name.as_str() {
                "Infinity" => Some(Number(f64::INFINITY)),
                "NaN" => Some(Number(f64::NAN)),
                name => {
                    self.enums.iter().rev().find_map(|scope| find(&scope.members, name)).flatten()
                }
            },
            Expression::StaticMemberExpression(it) => {
                self.evaluate_member(&it.object, it.property.name.as_str())
            }
            Expression::ComputedMemberExpression(it) => match &it.expression {
                Expression::StringLiteral(name) => {
                    self.evaluate_member(&it.object, name.value.as_str())
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// `E.A` of this enum or of an earlier one.
    fn evaluate_member(&self, object: &Expression<'_>, member: &str) -> Option<Constant> {
        let Expression::Identifier(object) = object else { return None };
        let name = object.name.as_str();
        let open =
            self.enums.iter().rev().find(|scope| scope.name == name).map(|scope| &scope.members);
        let declared = || {
            self.lists
                .iter()
                .rev()
                .flatten()
                .find(|declared| declared.name == name)
                .map(|declared| &declared.members)
        };
        find(open.or_else(declared)?, member).flatten()
    }

    fn evaluate_binary(&self, it: &BinaryExpression<'_>) -> Option<Constant> {
        use Constant::{Number, Text};
        let (left, right) = (self.evaluate(&it.left)?, self.evaluate(&it.right)?);
        let (left, right) = match (left, right) {
            (Number(left), Number(right)) => (left, right),
            (left, right) if it.operator == BinaryOperator::Addition => {
                let text = |value| match value {
                    Number(value) => number(value),
                    Text(value) => value,
                };
                return Some(Text(text(left) + &text(right)));
            }
            _ => return None,
        };
        let shift = (to_int32(right) as u32) & 31;
        Some(Number(match it.operator {
            BinaryOperator::Addition => left + right,
            BinaryOperator::Subtraction => left - right,
            BinaryOperator::Multiplication => left * right,
            BinaryOperator::Division => left / right,
            BinaryOperator::Remainder => left % right,
            BinaryOperator::Exponential => left.powf(right),
            BinaryOperator::BitwiseOR => f64::from(to_int32(left) | to_int32(right)),
            BinaryOperator::BitwiseAnd => f64::from(to_int32(left) & to_int32(right)),
            BinaryOperator::BitwiseXOR => f64::from(to_int32(left) ^ to_int32(right)),
            BinaryOperator::ShiftLeft => f64::from(to_int32(left).wrapping_shl(shift)),
            BinaryOperator::ShiftRight => f64::from(to_int32(left).wrapping_shr(shift)),
            BinaryOperator::ShiftRightZeroFill => {
                f64::from((to_int32(left) as u32).wrapping_shr(shift))
            }
            _ => return None,
        }))
    }
}

fn find(members: &[Member], name: &str) -> Option<Option<Constant>> {
    members.iter().rev().find(|(member, _)| member == name).map(|(_, constant)| constant.clone())
}

/// Whether an expression without a known value is certainly a text; such members have no reverse
/// mapping.
fn is_text(expression: &Expression<'_>) -> bool {
    match expression {
        Expression::StringLiteral(_) | Expression::TemplateLiteral(_) => true,
        Expression::ParenthesizedExpression(it) => is_text(&it.expression),
        Expression::TSAsExpression(it) => is_text(&it.expression),
        Expression::TSSatisfiesExpression(it) => is_text(&it.expression),
        Expression::BinaryExpression(it) => {
            it.operator == BinaryOperator::Addition && (is_text(&it.left) || is_text(&it.right))
        }
        _ => false,
    }
}

fn plain_text(template: &TemplateLiteral<'_>) -> Option<String> {
    let [only] = template.quasis.as_slice() else { return None };
    only.value.cooked.as_ref().map(ToString::to_string)
}

/// ECMAScript's ToInt32.
fn to_int32(value: f64) -> i32 {
    if !value.is_finite() {
        return 0;
    }
    let wrapped = value.trunc().rem_euclid(4_294_967_296.0);
    wrapped as u32 as i32
}

/// A number in JavaScript syntax. Rust writes the same digits, but never an exponent.
fn number(value: f64) -> String {
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "Infinity".to_owned() } else { "-Infinity".to_owned() }
    } else {
        value.to_string()
    }
}

/// A text as a JavaScript string literal.
fn quote(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => {
                quoted.push('\\');
                quoted.push(character);
            }
            '\u{0}'..='\u{1f}' | '\u{2028}' | '\u{2029}' => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(character));
            }
            _ => quoted.push(character),
        }
    }
    quoted.push('"');
    quoted
}
