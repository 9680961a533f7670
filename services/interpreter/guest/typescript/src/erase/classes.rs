//! Classes: modifiers, members that are only types, and parameter properties.

use oxc_ast::ast::{
    Class, ClassElement, Expression, Function, MethodDefinition, PropertyDefinition,
    PropertyDefinitionType, PropertyKey, Statement,
};
use oxc_ast_visit::{Visit, walk};
use oxc_span::{GetSpan, Span};
use oxc_syntax::scope::ScopeFlags;

use super::{Eraser, constructor_of, parameter_name};

impl Eraser<'_> {
    pub(super) fn class(&mut self, it: &Class<'_>) {
        for decorator in &it.decorators {
            self.visit_decorator(decorator);
        }
        if it.r#abstract {
            self.blank_token("abstract", it.span.start, it.body.span.start);
        }
        if let Some(id) = &it.id {
            self.visit_binding_identifier(id);
        }
        if let Some(type_parameters) = &it.type_parameters {
            self.blank(type_parameters.span);
        }
        if let Some(heritage) = &it.heritage {
            walk::walk_class_heritage(self, heritage);
        }
        if let (Some(first), Some(last)) = (it.implements.first(), it.implements.last()) {
            // The keyword is right before the first interface.
            let keyword = self.token_from(first.span.start).saturating_sub(1);
            let start = self.tokens.get(keyword).map_or(first.span.start, |token| token.start());
            self.edits.blank(start, last.span.end);
        }
        if let Some(constructor) = constructor_of(it) {
            self.parameter_properties(it, constructor);
        }
        for element in &it.body.body {
            self.element(element);
        }
    }

    fn element(&mut self, element: &ClassElement<'_>) {
        match element {
            ClassElement::StaticBlock(it) => self.visit_static_block(it),
            ClassElement::TSIndexSignature(it) => self.blank_whole(it.span),
            ClassElement::MethodDefinition(it) if it.value.body.is_none() => self.blank_whole(it.span),
            ClassElement::MethodDefinition(it) => self.method(it),
            ClassElement::PropertyDefinition(it)
                if it.declare || it.r#type == PropertyDefinitionType::TSAbstractPropertyDefinition =>
            {
                self.blank_whole(it.span);
            }
            ClassElement::PropertyDefinition(it) => self.property(it),
            ClassElement::AccessorProperty(it) => {
                self.fail(it.span, "`accessor` fields are not supported; write a getter and a setter, or a plain field")
            }
        }
    }

    fn method(&mut self, it: &MethodDefinition<'_>) {
        for decorator in &it.decorators {
            self.visit_decorator(decorator);
        }
        self.member_modifiers(it.span, &it.key);
        if it.optional {
            self.blank_token("?", it.key.span().end, it.value.span.start);
        }
        walk::walk_property_key(self, &it.key);
        self.visit_function(&it.value, ScopeFlags::Function);
    }

    fn property(&mut self, it: &PropertyDefinition<'_>) {
        for decorator in &it.decorators {
            self.visit_decorator(decorator);
        }
        self.member_modifiers(it.span, &it.key);
        let end = it.value.as_ref().map_or(it.span.end, |value| value.span().start);
        if it.optional {
            self.blank_token("?", it.key.span().end, end);
        }
        if it.definite {
            self.blank_token("!", it.key.span().end, end);
        }
        walk::walk_property_key(self, &it.key);
        if let Some(annotation) = &it.type_annotation {
            self.blank(annotation.span);
        }
        if let Some(value) = &it.value {
            self.visit_expression(value);
        }
        self.close(it.span.end);
    }

    /// Blanks a member's modifiers.
    fn member_modifiers(&mut self, span: Span, key: &PropertyKey<'_>) {
        let Some(first) = self.blank_modifiers(span.start, key.span().start) else { return };
        // The next token may continue the field above, if that ends without a semicolon.
        let mut index = self.token_from(first);
        while self.tokens.get(index).is_some_and(|token| self.edits.is_blank(token.start())) {
            index += 1;
        }
        let before =
            self.token_from(span.start).checked_sub(1).map_or("", |before| self.token_text(before));
        if matches!(self.token_text(index), "[" | "*" | "in" | "instanceof")
            && !matches!(before, ";" | "{")
        {
            self.edits.put(first, b';');
        }
    }

    /// Blanks the modifiers in a range; returns the position of the first.
    pub(super) fn blank_modifiers(&mut self, start: u32, end: u32) -> Option<u32> {
        let mut first = None;
        let mut index = self.token_from(start);
        while let Some(token) = self.tokens.get(index).filter(|token| token.start() < end) {
            let modifier = matches!(
                self.token_text(index),
                "public"
                    | "private"
                    | "protected"
                    | "readonly"
                    | "override"
                    | "abstract"
                    | "declare"
            );
            if modifier {
                first = first.or(Some(token.start()));
                self.edits.blank(token.start(), token.end());
            }
            index += 1;
        }
        first
    }

    /// `constructor(private x: T)`: declares the field, and assigns it at the first position where
    /// fields may be assigned.
    fn parameter_properties(&mut self, class: &Class<'_>, constructor: &Function<'_>) {
        let mut names = Vec::new();
        for parameter in &constructor.params.items {
            if parameter.accessibility.is_none() && !parameter.readonly && !parameter.r#override {
                continue;
            }
            match parameter_name(parameter) {
                Some(name) => names.push(name),
                None => self.fail(parameter.span, "a parameter property must have a plain name"),
            }
        }
        let Some(body) = constructor.body.as_ref().filter(|_| !names.is_empty()) else { return };
        let place = if class.heritage.is_some() {
            match body.statements.iter().find(|statement| is_super_call(statement)) {
                Some(statement) => statement.span().end,
                None => {
                    let message = "with parameter properties, a constructor must call `super(…)` as a statement of its own";
                    return self.fail(constructor.span, message);
                }
            }
        } else {
            body.directives.last().map_or(body.span.start + 1, |directive| directive.span.end)
        };
        let fields: String = names.iter().map(|name| format!(" {name};")).collect();
        let assignments: String =
            names.iter().map(|name| format!(" this.{name} = {name};")).collect();
        let open = if self.source[..place as usize].ends_with([';', '{']) { "" } else { ";" };
        self.edits.insert(class.body.span.start + 1, fields);
        self.edits.insert(place, format!("{open}{assignments}"));
    }
}

fn is_super_call(statement: &Statement<'_>) -> bool {
    let Statement::ExpressionStatement(statement) = statement else { return false };
    match &statement.expression {
        Expression::CallExpression(call) => matches!(call.callee, Expression::Super(_)),
        _ => false,
    }
}
