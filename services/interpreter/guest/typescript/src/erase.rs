//! Walks the syntax tree and blanks TypeScript-only syntax.
//!
//! Types are blanked in place. Three cases need care, because JavaScript reads line breaks where
//! TypeScript had a type. A statement or field whose end was blanked is closed with a semicolon. A
//! statement or class member that is blanked as a whole leaves one. A parenthesis that would end up
//! on another line than its `=>` or `return` is moved.

mod classes;
mod enums;
mod modules;

use std::collections::HashSet;

use oxc_allocator::Vec as ArenaVec;
use oxc_ast::ast::{
    ArrowFunctionBody, ArrowFunctionExpression, BinaryExpression, BindingIdentifier,
    BindingPattern, Class, Declaration, Decorator, ExportDeclaration, ExportDefaultDeclarationKind,
    Expression, FormalParameter, Function, IdentifierReference, ImportOrExportKind,
    LogicalExpression, ModuleDeclaration, Statement, TSAsExpression, TSEnumDeclaration,
    TSImportEqualsDeclaration, TSInstantiationExpression, TSNamespaceDeclaration,
    TSNamespaceDeclarationBody, TSNonNullExpression, TSSatisfiesExpression, TSThisParameter,
    TSType, TSTypeAnnotation, TSTypeAssertion, TSTypeParameterDeclaration,
    TSTypeParameterInstantiation, VariableDeclarator,
};
use oxc_ast_visit::{Visit, walk};
use oxc_parser::{ParserReturn, Token};
use oxc_span::{GetSpan, Span};

use crate::edits::Edits;
use crate::strip::Failure;

/// Turns a parsed source into JavaScript.
pub(crate) fn erase(source: &str, parsed: &ParserReturn<'_>) -> Result<String, Failure> {
    let program = &parsed.program;
    let mut eraser = Eraser {
        source,
        tokens: &parsed.tokens,
        edits: Edits::new(source),
        failure: None,
        lists: Vec::new(),
        enums: Vec::new(),
        is_module: program.body.iter().any(Statement::is_module_declaration),
        used: HashSet::new(),
        bound: HashSet::new(),
        types: HashSet::new(),
    };
    eraser.visit_program(program);
    if eraser.is_module {
        eraser.drop_unused_types(&program.body);
    }
    match eraser.failure {
        Some((offset, message)) => Err(Failure::from_offset(source, offset, message)),
        None => Ok(eraser.edits.apply()),
    }
}

struct Eraser<'s> {
    source: &'s str,
    tokens: &'s [Token],
    edits: Edits,
    /// The first construct without a JavaScript equivalent: its position, and what to write
    /// instead.
    failure: Option<(u32, String)>,
    /// For each list of statements around the current position, the enums declared in it.
    lists: Vec<Vec<enums::DeclaredEnum>>,
    /// For each enum around the current position, its name and the members that its initializers
    /// may name.
    enums: Vec<enums::OpenEnum>,
    is_module: bool,
    /// In a module: names used as values, names declared as values, names declared as types.
    used: HashSet<String>,
    bound: HashSet<String>,
    types: HashSet<String>,
}

impl Eraser<'_> {
    fn fail(&mut self, span: Span, message: impl Into<String>) {
        if self.failure.is_none() {
            self.failure = Some((span.start, message.into()));
        }
    }

    fn blank(&mut self, span: Span) {
        self.edits.blank(span.start, span.end);
    }

    /// Blanks a statement or a class member as a whole. The semicolon separates its neighbors.
    fn blank_whole(&mut self, span: Span) {
        self.blank(span);
        self.edits.put(span.start, b';');
    }

    /// Closes a statement or field with a semicolon if it had none and its end was blanked.
    fn close(&mut self, end: u32) {
        let Some(start) = self.edits.blank_start(end) else { return };
        let next = self.token_text(self.token_from(end));
        if !self.source[..end as usize].ends_with(';') && !matches!(next, "" | ";" | "}") {
            self.edits.put(start, b';');
        }
    }

    /// The first token at or after a position.
    fn token_from(&self, offset: u32) -> usize {
        self.tokens.partition_point(|token| token.start() < offset)
    }

    fn token_text(&self, index: usize) -> &str {
        self.tokens
            .get(index)
            .map_or("", |token| &self.source[token.start() as usize..token.end() as usize])
    }

    /// Blanks the first token with this text in a range.
    fn blank_token(&mut self, text: &str, start: u32, end: u32) {
        let mut index = self.token_from(start);
        while let Some(token) = self.tokens.get(index).filter(|token| token.start() < end) {
            if self.token_text(index) == text {
                self.edits.blank(token.start(), token.end());
                return;
            }
            index += 1;
        }
    }

    /// Blanks a range and the comma that follows it.
    fn blank_with_comma(&mut self, span: Span) {
        let next = self.token_from(span.end);
        let end = if self.token_text(next) == "," { self.tokens[next].end() } else { span.end };
        self.edits.blank(span.start, end);
    }

    fn spans_lines(&self, start: u32, end: u32) -> bool {
        self.source[start as usize..end as usize].contains(['\n', '\r', '\u{2028}', '\u{2029}'])
    }

    /// Handles an operand of a binary operator. `a + b as T * c` means `((a + b) as T) * c`, which
    /// must not become `a + b * c`.
    fn operand(&mut self, operand: &Expression<'_>) {
        let mut inner = operand;
        loop {
            inner = match inner {
                Expression::TSAsExpression(it) => &it.expression,
                Expression::TSSatisfiesExpression(it) => &it.expression,
                _ => break,
            };
        }
        let binds_weakly = matches!(
            inner,
            Expression::BinaryExpression(_)
                | Expression::LogicalExpression(_)
                | Expression::UnaryExpression(_)
                | Expression::AwaitExpression(_)
                | Expression::PrivateInExpression(_)
                | Expression::TSTypeAssertion(_)
        );
        if inner.span() != operand.span() && binds_weakly {
            self.edits.insert(inner.span().start, "(");
            self.edits.put(inner.span().end, b')');
        }
    }

    /// `expression as T` and `expression satisfies T`.
    fn assertion(&mut self, expression: &Expression<'_>, span: Span) {
        self.edits.blank(expression.span().end, span.end);
    }

    /// Whether a declaration exists only for types.
    fn is_erased(&mut self, declaration: &Declaration<'_>) -> bool {
        match declaration {
            Declaration::TSTypeAliasDeclaration(it) => {
                self.types.insert(it.id.name.to_string());
                true
            }
            Declaration::TSInterfaceDeclaration(it) => {
                self.types.insert(it.id.name.to_string());
                true
            }
            Declaration::VariableDeclaration(it) => it.declare,
            Declaration::FunctionDeclaration(it) => it.declare || it.body.is_none(),
            Declaration::ClassDeclaration(it) => it.declare,
            Declaration::TSEnumDeclaration(it) => it.declare,
            Declaration::TSExternalModuleDeclaration(_) | Declaration::TSGlobalDeclaration(_) => {
                true
            }
            Declaration::TSNamespaceDeclaration(it) => it.declare || !has_values(it),
            Declaration::TSImportEqualsDeclaration(it) => {
                it.import_kind == ImportOrExportKind::Type
            }
        }
    }

    fn is_erased_statement(&mut self, statement: &Statement<'_>) -> bool {
        if let Some(declaration) = statement.as_declaration() {
            return self.is_erased(declaration);
        }
        match statement.as_module_declaration() {
            Some(ModuleDeclaration::ImportDeclaration(it)) => {
                it.import_kind == ImportOrExportKind::Type
            }
            Some(ModuleDeclaration::ExportAllDeclaration(it)) => {
                it.export_kind == ImportOrExportKind::Type
            }
            Some(ModuleDeclaration::ExportNamedDeclaration(it)) => {
                it.export_kind == ImportOrExportKind::Type
            }
            Some(ModuleDeclaration::ExportFromDeclaration(it)) => {
                it.export_kind == ImportOrExportKind::Type
            }
            Some(ModuleDeclaration::ExportDeclaration(it)) => self.is_erased(&it.declaration),
            Some(ModuleDeclaration::ExportDefaultDeclaration(it)) => match &it.declaration {
                ExportDefaultDeclarationKind::TSInterfaceDeclaration(_) => true,
                ExportDefaultDeclarationKind::FunctionDeclaration(it) => it.body.is_none(),
                _ => false,
            },
            Some(ModuleDeclaration::TSNamespaceExportDeclaration(_)) => true,
            Some(ModuleDeclaration::TSExportAssignment(_)) | None => false,
        }
    }
}

/// Whether a namespace contains anything but types.
fn has_values(namespace: &TSNamespaceDeclaration<'_>) -> bool {
    match &namespace.body {
        TSNamespaceDeclarationBody::TSNamespaceDeclaration(inner) => has_values(inner),
        TSNamespaceDeclarationBody::TSModuleBlock(block) => block.body.iter().any(|statement| {
            let declaration = match statement {
                Statement::ExportDeclaration(export) => Some(&export.declaration),
                other => other.as_declaration(),
            };
            match declaration {
                Some(
                    Declaration::TSTypeAliasDeclaration(_) | Declaration::TSInterfaceDeclaration(_),
                ) => false,
                Some(Declaration::TSNamespaceDeclaration(inner)) => {
                    !inner.declare && has_values(inner)
                }
                Some(Declaration::TSImportEqualsDeclaration(_)) => {
                    matches!(statement, Statement::ExportDeclaration(_))
                }
                _ => true,
            }
        }),
    }
}

impl<'a> Visit<'a> for Eraser<'_> {
    fn visit_statements(&mut self, it: &ArenaVec<'a, Statement<'a>>) {
        self.lists.push(Vec::new());
        walk::walk_statements(self, it);
        self.lists.pop();
    }

    fn visit_statement(&mut self, it: &Statement<'a>) {
        if self.is_erased_statement(it) {
            self.blank_whole(it.span());
            return;
        }
        walk::walk_statement(self, it);
        self.close(it.span().end);
    }

    fn visit_identifier_reference(&mut self, it: &IdentifierReference<'a>) {
        if self.is_module {
            self.used.insert(it.name.to_string());
        }
        self.qualify_member(it);
    }

    fn visit_binding_identifier(&mut self, it: &BindingIdentifier<'a>) {
        if self.is_module {
            self.bound.insert(it.name.to_string());
        }
    }

    // --- Types ---

    fn visit_ts_type_annotation(&mut self, it: &TSTypeAnnotation<'a>) {
        self.blank(it.span);
    }

    fn visit_ts_type_parameter_declaration(&mut self, it: &TSTypeParameterDeclaration<'a>) {
        self.blank(it.span);
    }

    fn visit_ts_type_parameter_instantiation(&mut self, it: &TSTypeParameterInstantiation<'a>) {
        self.blank(it.span);
    }

    fn visit_ts_type(&mut self, _: &TSType<'a>) {}

    // --- Expressions ---

    fn visit_ts_as_expression(&mut self, it: &TSAsExpression<'a>) {
        self.visit_expression(&it.expression);
        self.assertion(&it.expression, it.span);
    }

    fn visit_ts_satisfies_expression(&mut self, it: &TSSatisfiesExpression<'a>) {
        self.visit_expression(&it.expression);
        self.assertion(&it.expression, it.span);
    }

    fn visit_ts_non_null_expression(&mut self, it: &TSNonNullExpression<'a>) {
        self.visit_expression(&it.expression);
        self.edits.blank(it.span.end - 1, it.span.end);
    }

    fn visit_ts_instantiation_expression(&mut self, it: &TSInstantiationExpression<'a>) {
        self.visit_expression(&it.expression);
        self.blank(it.type_arguments.span);
    }

    /// `<T>expression`.
    fn visit_ts_type_assertion(&mut self, it: &TSTypeAssertion<'a>) {
        let inner = it.expression.span();
        self.edits.blank(it.span.start, inner.start);
        let first = self.token_text(self.token_from(inner.start));
        // After `return`, `=>` or at the start of a statement these would be parsed as something
        // else.
        if matches!(first, "{" | "function" | "class" | "async" | "let")
            || self.spans_lines(it.span.start, inner.start)
        {
            self.edits.put(it.span.start, b'(');
            self.visit_expression(&it.expression);
            self.edits.insert(inner.end, ")");
        } else {
            self.visit_expression(&it.expression);
        }
    }

    fn visit_binary_expression(&mut self, it: &BinaryExpression<'a>) {
        walk::walk_binary_expression(self, it);
        self.operand(&it.left);
        self.operand(&it.right);
    }

    fn visit_logical_expression(&mut self, it: &LogicalExpression<'a>) {
        walk::walk_logical_expression(self, it);
        self.operand(&it.left);
        self.operand(&it.right);
    }

    // --- Functions ---

    fn visit_arrow_function_expression(&mut self, it: &ArrowFunctionExpression<'a>) {
        let open = it.params.span.start;
        if let Some(type_parameters) = &it.type_parameters {
            self.blank(type_parameters.span);
            if self.spans_lines(type_parameters.span.start, open) {
                // `return <\nT>(x) => x` must not become `return`, and `async` must stay on the
                // line of its parenthesis.
                self.edits.put(type_parameters.span.start, b'(');
                self.edits.blank(open, open + 1);
            }
        }
        self.visit_formal_parameters(&it.params);
        if let Some(return_type) = &it.return_type {
            self.blank(return_type.span);
            let close = it.params.span.end - 1;
            if self.spans_lines(close, return_type.span.end) {
                // No line may break between `)` and `=>`.
                self.edits.blank(close, close + 1);
                self.edits.put(return_type.span.end - 1, b')');
            }
        }
        match &it.body {
            ArrowFunctionBody::FunctionBody(body) => self.visit_function_body(body),
            body => walk::walk_arrow_function_body(self, body),
        }
    }

    fn visit_ts_this_parameter(&mut self, it: &TSThisParameter<'a>) {
        self.blank_with_comma(it.span);
    }

    fn visit_formal_parameter(&mut self, it: &FormalParameter<'a>) {
        if it.accessibility.is_some() || it.readonly || it.r#override {
            self.blank_modifiers(it.span.start, it.pattern.span().start);
        }
        if it.optional {
            self.blank_token(
                "?",
                it.pattern.span().end,
                it.span.end.max(it.pattern.span().end + 1),
            );
        }
        walk::walk_formal_parameter(self, it);
    }

    fn visit_variable_declarator(&mut self, it: &VariableDeclarator<'a>) {
        if it.definite {
            self.blank_token("!", it.id.span().end, it.span.end);
        }
        walk::walk_variable_declarator(self, it);
    }

    // --- Classes ---

    fn visit_class(&mut self, it: &Class<'a>) {
        self.class(it);
    }

    fn visit_decorator(&mut self, it: &Decorator<'a>) {
        self.fail(
            it.span,
            "decorators are not supported; call a function on the class or the method instead",
        );
    }

    // --- Constructs that emit code ---

    fn visit_ts_enum_declaration(&mut self, it: &TSEnumDeclaration<'a>) {
        self.enumeration(it, None);
    }

    fn visit_export_declaration(&mut self, it: &ExportDeclaration<'a>) {
        match &it.declaration {
            Declaration::TSEnumDeclaration(enumeration) => {
                self.enumeration(enumeration, Some(it.span.start))
            }
            Declaration::TSImportEqualsDeclaration(import) => {
                self.visit_ts_import_equals_declaration(import)
            }
            _ => walk::walk_export_declaration(self, it),
        }
    }

    fn visit_ts_namespace_declaration(&mut self, it: &TSNamespaceDeclaration<'a>) {
        let name = &it.id.name;
        self.fail(
            it.span,
            format!("`namespace {name}` with values is not supported; write an object, `const {name} = {{ … }}`, or a module file"),
        );
    }

    fn visit_ts_import_equals_declaration(&mut self, it: &TSImportEqualsDeclaration<'a>) {
        let name = &it.id.name;
        self.fail(
            it.span,
            format!("`import {name} = …` is not supported; write `import {name} from \"./file\"`, or `const {name} = …` for an alias"),
        );
    }

    fn visit_ts_export_assignment(&mut self, it: &oxc_ast::ast::TSExportAssignment<'a>) {
        self.fail(it.span, "`export =` is not supported; write `export default …`");
    }
}

/// The name of a parameter, if it is a plain identifier.
fn parameter_name<'p>(parameter: &'p FormalParameter<'_>) -> Option<&'p str> {
    match &parameter.pattern {
        BindingPattern::BindingIdentifier(identifier) => Some(identifier.name.as_str()),
        BindingPattern::AssignmentPattern(it) => match &it.left {
            BindingPattern::BindingIdentifier(identifier) => Some(identifier.name.as_str()),
            _ => None,
        },
        _ => None,
    }
}

/// The constructor of a class, if it has one with a body.
fn constructor_of<'c, 'a>(class: &'c Class<'a>) -> Option<&'c Function<'a>> {
    class.body.body.iter().find_map(|element| match element {
        oxc_ast::ast::ClassElement::MethodDefinition(it)
            if it.kind == oxc_ast::ast::MethodDefinitionKind::Constructor
                && it.value.body.is_some() =>
        {
            Some(&*it.value)
        }
        _ => None,
    })
}
