//! Imports and exports of types.

use oxc_allocator::Vec as ArenaVec;
use oxc_ast::ast::{
    ExportNamedDeclaration, ImportDeclaration, ImportDeclarationSpecifier, ImportOrExportKind,
    ModuleDeclaration, Statement,
};
use oxc_span::{GetSpan, Span};

use super::Eraser;

impl Eraser<'_> {
    /// Drops types from imports and exports. Unmarked names are dropped if they are used only in
    /// types: their module need not export such a name at run time.
    pub(super) fn drop_unused_types(&mut self, body: &ArenaVec<'_, Statement<'_>>) {
        for statement in body {
            match statement.as_module_declaration() {
                Some(ModuleDeclaration::ImportDeclaration(it))
                    if it.import_kind == ImportOrExportKind::Value =>
                {
                    self.import(it);
                }
                Some(ModuleDeclaration::ExportNamedDeclaration(it))
                    if it.export_kind == ImportOrExportKind::Value =>
                {
                    self.export(it);
                }
                Some(ModuleDeclaration::ExportFromDeclaration(it))
                    if it.export_kind == ImportOrExportKind::Value =>
                {
                    for specifier in &it.specifiers {
                        if specifier.export_kind == ImportOrExportKind::Type {
                            self.blank_with_comma(specifier.span);
                        }
                    }
                }
                _ => {}
            }
        }
    }

    fn import(&mut self, it: &ImportDeclaration<'_>) {
        let Some(specifiers) = &it.specifiers else { return };
        let dropped: Vec<Span> =
            specifiers.iter().filter(|it| self.is_type(it)).map(GetSpan::span).collect();
        if dropped.is_empty() {
            return;
        }
        if dropped.len() == specifiers.len() {
            return self.blank_whole(it.span);
        }
        for span in dropped {
            match specifiers.last() {
                // `import kept, * as dropped`: the comma goes too.
                Some(ImportDeclarationSpecifier::ImportNamespaceSpecifier(last))
                    if last.span == span =>
                {
                    let kept = specifiers.first().map_or(span.start, |first| first.span().end);
                    self.edits.blank(kept, span.end);
                }
                _ => self.blank_with_comma(span),
            }
        }
    }

    fn is_type(&self, specifier: &ImportDeclarationSpecifier<'_>) -> bool {
        let local = match specifier {
            ImportDeclarationSpecifier::ImportSpecifier(it) => {
                if it.import_kind == ImportOrExportKind::Type {
                    return true;
                }
                &it.local
            }
            ImportDeclarationSpecifier::ImportDefaultSpecifier(it) => &it.local,
            ImportDeclarationSpecifier::ImportNamespaceSpecifier(it) => &it.local,
        };
        let is_used_in_type = |name: &str| {
            (0..self.tokens.len()).any(|index| {
                self.token_text(index) == name && self.edits.is_blank(self.tokens[index].start())
            })
        };
        !self.used.contains(local.name.as_str()) && is_used_in_type(local.name.as_str())
    }

    fn export(&mut self, it: &ExportNamedDeclaration<'_>) {
        for specifier in &it.specifiers {
            let local = specifier.local.name();
            let local = local.as_str();
            let is_type = specifier.export_kind == ImportOrExportKind::Type
                || self.types.contains(local) && !self.bound.contains(local);
            if is_type {
                self.blank_with_comma(specifier.span);
            }
        }
    }
}
