//! What the parts of the survey find, of which no more is kept than can be told: a repository can
//! be made of nothing but entry points.

use super::{EntryPoint, Module, Operation, Survey, SurveyLimits, is_aside};

/// So many of each kind one file may have.
pub(super) const MAX_OF_FILE: usize = 300;

/// Collects what the parts find.
pub(crate) struct Found {
    limits: SurveyLimits,
    modules: Kept<Module>,
    entries: Kept<EntryPoint>,
    operations: Kept<Operation>,
}

/// A list that is cut back to its best when it is twice as long as it may get.
struct Kept<T> {
    list: Vec<T>,
    limit: usize,
    /// How many of the file that is looked at are in it.
    of_file: usize,
    /// How many were left out.
    left_out: usize,
}

impl<T> Kept<T> {
    const fn new(limit: usize) -> Self {
        Self { list: Vec::new(), limit, of_file: 0, left_out: 0 }
    }

    const fn is_full(&self) -> bool {
        self.of_file >= MAX_OF_FILE
    }

    fn push(&mut self, one: T, order: fn(&mut Vec<T>)) {
        if self.is_full() {
            self.left_out += 1;
            return;
        }
        self.of_file += 1;
        self.list.push(one);
        if self.list.len() > self.limit.saturating_mul(2).saturating_add(MAX_OF_FILE) {
            self.cut(order);
        }
    }

    fn cut(&mut self, order: fn(&mut Vec<T>)) {
        order(&mut self.list);
        self.left_out += self.list.len().saturating_sub(self.limit);
        self.list.truncate(self.limit);
    }

    fn finish(mut self, what: &str, order: fn(&mut Vec<T>), survey: &mut Survey) -> Vec<T> {
        self.cut(order);
        if self.left_out > 0 {
            survey.truncated.push(format!("{} more {what}", self.left_out));
        }
        self.list
    }
}

impl Found {
    pub(crate) fn new(limits: &SurveyLimits) -> Self {
        Self {
            limits: limits.clone(),
            modules: Kept::new(limits.modules),
            entries: Kept::new(limits.entries),
            operations: Kept::new(limits.operations),
        }
    }

    /// The next file begins.
    pub(crate) const fn end_of_file(&mut self) {
        self.modules.of_file = 0;
        self.entries.of_file = 0;
        self.operations.of_file = 0;
    }

    pub(super) fn module(&mut self, mut module: Module) {
        let text = self.limits.text;
        module.name = cut(&module.name, text);
        shorten(&mut module.about, text);
        module.frameworks.sort();
        module.frameworks.dedup();
        module.members.truncate(self.limits.modules);
        for member in &mut module.members {
            *member = cut(member, text);
        }
        self.modules.push(module, |modules| order_modules(modules));
    }

    pub(super) fn entry(&mut self, mut entry: EntryPoint) {
        let text = self.limits.text;
        entry.aside = is_aside(&entry.place.path);
        entry.name = cut(&entry.name, text);
        shorten(&mut entry.about, text);
        shorten(&mut entry.with, text);
        entry.arguments.truncate(self.limits.arguments);
        entry.arguments.shrink_to_fit();
        for argument in &mut entry.arguments {
            argument.name = cut(&argument.name, text);
            shorten(&mut argument.about, text);
        }
        self.entries.push(entry, order_entries);
    }

    pub(super) fn operation(&mut self, mut operation: Operation) {
        operation.name = cut(&operation.name, self.limits.text);
        shorten(&mut operation.about, self.limits.text);
        self.operations.push(operation, order_operations);
    }

    /// How much is kept now.
    #[cfg(test)]
    pub(super) const fn len(&self) -> usize {
        self.modules.list.len() + self.entries.list.len() + self.operations.list.len()
    }

    /// Whether no more operations of this file are taken.
    pub(super) const fn has_operations(&self) -> bool {
        self.operations.is_full()
    }

    /// Whether no more entry points of this file are taken.
    pub(super) const fn has_entries(&self) -> bool {
        self.entries.is_full()
    }

    pub(super) fn finish(self, survey: &mut Survey) {
        survey.modules = self.modules.finish("manifests", |modules| order_modules(modules), survey);
        survey.entries = self.entries.finish("entry points", order_entries, survey);
        survey.operations = self.operations.finish("operations", order_operations, survey);
    }
}

fn depth(path: &str) -> usize {
    path.matches('/').count()
}

fn order_modules(modules: &mut [Module]) {
    modules.sort_by(|a, b| (depth(&a.place.path), &a.place).cmp(&(depth(&b.place.path), &b.place)));
}

fn order_entries(entries: &mut Vec<EntryPoint>) {
    // What describes itself and takes arguments is likelier to be of use to somebody than what
    // doesn't.
    let rank = |entry: &EntryPoint| {
        (
            entry.aside,
            entry.kind,
            entry.about.is_none(),
            entry.arguments.is_empty(),
            depth(&entry.place.path),
        )
    };
    entries.sort_by(|a, b| {
        rank(a).cmp(&rank(b)).then_with(|| a.place.cmp(&b.place)).then_with(|| a.name.cmp(&b.name))
    });
    entries.dedup();
}

/// They stay in the order they were found in, which is that of their files.
const fn order_operations(_: &mut Vec<Operation>) {}

fn cut(text: &str, limit: usize) -> String {
    text.chars().take(limit).collect()
}

fn shorten(text: &mut Option<String>, limit: usize) {
    if let Some(long) = text {
        // Long ones have to be read no further than they are told.
        let mut short = String::new();
        for word in long.split_whitespace() {
            if !short.is_empty() {
                short.push(' ');
            }
            short.extend(word.chars().take(limit + 1));
            if short.len() > limit.saturating_mul(4) + 4 {
                break;
            }
        }
        let is_longer = short.chars().count() > limit;
        short = cut(&short, limit);
        short.shrink_to_fit();
        *long = if is_longer { format!("{short}…") } else { short };
    }
    text.take_if(|text| text.is_empty());
}
