//! Collects the findings of a survey, within its limits: a repository can consist of nothing but
//! entry points.

use super::{EntryPoint, Module, Operation, Survey, SurveyLimits, is_secondary};

/// Findings of each kind per file.
pub(super) const MAX_PER_FILE: usize = 300;

/// Collects findings.
pub(crate) struct Findings {
    limits: SurveyLimits,
    modules: BoundedList<Module>,
    entries: BoundedList<EntryPoint>,
    operations: BoundedList<Operation>,
}

/// A list that is truncated to its best items when it is twice as long as its limit.
struct BoundedList<T> {
    list: Vec<T>,
    limit: usize,
    /// The number of items of the current file.
    count_in_file: usize,
    /// The number of omitted items.
    omitted: usize,
}

impl<T> BoundedList<T> {
    const fn new(limit: usize) -> Self {
        Self { list: Vec::new(), limit, count_in_file: 0, omitted: 0 }
    }

    const fn is_full(&self) -> bool {
        self.count_in_file >= MAX_PER_FILE
    }

    fn push(&mut self, item: T, order: fn(&mut Vec<T>)) {
        if self.is_full() {
            self.omitted += 1;
            return;
        }
        self.count_in_file += 1;
        self.list.push(item);
        if self.list.len() > self.limit.saturating_mul(2).saturating_add(MAX_PER_FILE) {
            self.truncate(order);
        }
    }

    fn truncate(&mut self, order: fn(&mut Vec<T>)) {
        order(&mut self.list);
        self.omitted += self.list.len().saturating_sub(self.limit);
        self.list.truncate(self.limit);
    }

    fn finish(mut self, label: &str, order: fn(&mut Vec<T>), survey: &mut Survey) -> Vec<T> {
        self.truncate(order);
        if self.omitted > 0 {
            survey.truncated.push(format!("{} more {label}", self.omitted));
        }
        self.list
    }
}

impl Findings {
    pub(crate) fn new(limits: &SurveyLimits) -> Self {
        Self {
            limits: limits.clone(),
            modules: BoundedList::new(limits.modules),
            entries: BoundedList::new(limits.entries),
            operations: BoundedList::new(limits.operations),
        }
    }

    /// Starts the next file.
    pub(crate) const fn start_next_file(&mut self) {
        self.modules.count_in_file = 0;
        self.entries.count_in_file = 0;
        self.operations.count_in_file = 0;
    }

    pub(super) fn add_module(&mut self, mut module: Module) {
        let text = self.limits.text;
        module.name = truncate_text(&module.name, text);
        shorten(&mut module.about, text);
        module.frameworks.sort();
        module.frameworks.dedup();
        module.members.truncate(self.limits.modules);
        for member in &mut module.members {
            *member = truncate_text(member, text);
        }
        self.modules.push(module, |modules| sort_modules(modules));
    }

    pub(super) fn add_entry(&mut self, mut entry: EntryPoint) {
        let text = self.limits.text;
        entry.aside = is_secondary(&entry.place.path);
        entry.name = truncate_text(&entry.name, text);
        shorten(&mut entry.about, text);
        shorten(&mut entry.with, text);
        entry.arguments.truncate(self.limits.arguments);
        entry.arguments.shrink_to_fit();
        for argument in &mut entry.arguments {
            argument.name = truncate_text(&argument.name, text);
            shorten(&mut argument.about, text);
        }
        self.entries.push(entry, sort_entries);
    }

    pub(super) fn add_operation(&mut self, mut operation: Operation) {
        operation.name = truncate_text(&operation.name, self.limits.text);
        shorten(&mut operation.about, self.limits.text);
        self.operations.push(operation, keep_order);
    }

    /// The number of items.
    #[cfg(test)]
    pub(super) const fn len(&self) -> usize {
        self.modules.list.len() + self.entries.list.len() + self.operations.list.len()
    }

    /// Whether the current file may add no more operations.
    pub(super) const fn is_full_of_operations(&self) -> bool {
        self.operations.is_full()
    }

    /// Whether the current file may add no more entry points.
    pub(super) const fn is_full_of_entries(&self) -> bool {
        self.entries.is_full()
    }

    pub(super) fn finish(self, survey: &mut Survey) {
        survey.modules = self.modules.finish("manifests", |modules| sort_modules(modules), survey);
        survey.entries = self.entries.finish("entry points", sort_entries, survey);
        survey.operations = self.operations.finish("operations", keep_order, survey);
    }
}

fn depth(path: &str) -> usize {
    path.matches('/').count()
}

fn sort_modules(modules: &mut [Module]) {
    modules.sort_by(|a, b| (depth(&a.place.path), &a.place).cmp(&(depth(&b.place.path), &b.place)));
}

fn sort_entries(entries: &mut Vec<EntryPoint>) {
    // Entry points with a description and arguments are likelier to be useful.
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

/// Operations stay in the order of their files.
const fn keep_order(_: &mut Vec<Operation>) {}

fn truncate_text(text: &str, limit: usize) -> String {
    text.chars().take(limit).collect()
}

fn shorten(text: &mut Option<String>, limit: usize) {
    if let Some(long) = text {
        // Read no more of a long text than is kept.
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
        short = truncate_text(&short, limit);
        short.shrink_to_fit();
        *long = if is_longer { format!("{short}…") } else { short };
    }
    text.take_if(|text| text.is_empty());
}
