//! Policies, and the approvals they ask for.

use construct_domain::{
    ApprovalId, OrganizationId,
    policy::{MAX_PATTERN_BYTES, MAX_PATTERNS, MAX_REASON_CHARS, MAX_RULES, invalid_patterns},
};
use construct_proto::v1::{
    self, DecideApprovalRequest, GetApprovalRequest, ListApprovalsRequest, PolicyRule,
    decide_approval_request::Decision,
};
use construct_store::{ApprovalFilter, Cursor};
use tonic::Status;

use super::tasks::checked;
use crate::{
    convert,
    page::{Column, Page},
    validate::Violations,
};

/// Characters of an HTTP method.
const METHOD_CHARS: usize = 32;
/// Characters of what a person says about a decision.
const WORDS_CHARS: usize = 1024;

/// A list of rules.
pub(super) fn policy(violations: &mut Violations, field: &str, rules: &[PolicyRule]) {
    violations.require(rules.len() <= MAX_RULES, field, || {
        format!("must have at most {MAX_RULES} rules, has {}", rules.len())
    });
    for (index, rule) in rules.iter().take(MAX_RULES).enumerate() {
        self::rule(violations, &format!("{field}[{index}]"), rule);
    }
}

fn rule(violations: &mut Violations, field: &str, rule: &PolicyRule) {
    let lists = [
        ("tools", &rule.tools),
        ("paths", &rule.paths),
        ("commands", &rule.commands),
        ("hosts", &rule.hosts),
        ("methods", &rule.methods),
        ("agents", &rule.agents),
    ];
    let mut fits = true;
    for (name, patterns) in lists {
        violations.require(patterns.len() <= MAX_PATTERNS, &format!("{field}.{name}"), || {
            format!("must have at most {MAX_PATTERNS} entries, has {}", patterns.len())
        });
        fits &= patterns.len() <= MAX_PATTERNS;
        for (index, pattern) in patterns.iter().take(MAX_PATTERNS).enumerate() {
            let short = (1..=MAX_PATTERN_BYTES).contains(&pattern.len()) && !pattern.contains('\0');
            violations.require(short, &format!("{field}.{name}[{index}]"), || {
                format!("must have 1 to {MAX_PATTERN_BYTES} bytes, and no character U+0000")
            });
            fits &= short;
        }
    }
    for (index, method) in rule.methods.iter().take(MAX_PATTERNS).enumerate() {
        let known =
            method.len() <= METHOD_CHARS && method.bytes().all(|byte| byte.is_ascii_alphabetic());
        violations.require(known, &format!("{field}.methods[{index}]"), || {
            format!("must be a method: at most {METHOD_CHARS} letters")
        });
    }
    violations.chars(&format!("{field}.reason"), &rule.reason, MAX_REASON_CHARS);
    match convert::to_rule(rule.clone()) {
        None => violations.add(format!("{field}.action"), "must be allow, ask or deny"),
        // What is too long is not compiled.
        Some(rule) if fits => {
            for (pattern, description) in invalid_patterns(&rule) {
                violations.add(format!("{field}.{pattern}"), description);
            }
        }
        Some(_) => {}
    }
}

pub(crate) fn get_approval(request: &GetApprovalRequest) -> Result<ApprovalId, Status> {
    let mut violations = Violations::new();
    let approval = violations.id("approval", &request.approval);
    checked(violations, approval)
}

/// Returns the page and the filter.
pub(crate) fn list_approvals(
    organization: OrganizationId,
    request: &ListApprovalsRequest,
) -> Result<(Page<Cursor>, ApprovalFilter), Status> {
    let mut violations = Violations::new();
    let filter = request.filter.clone().unwrap_or_default();
    let task =
        if filter.task.is_empty() { None } else { violations.id("filter.task", &filter.task) };
    let tree =
        if filter.tree.is_empty() { None } else { violations.id("filter.tree", &filter.tree) };
    let state = v1::ApprovalState::try_from(filter.state);
    violations.require(state.is_ok(), "filter.state", || "is not a known state".into());
    let orders = [Column::CreatedAt, Column::UpdatedAt];
    let page = Page::read(
        request.page.as_ref(),
        "ListApprovals",
        organization,
        &filter,
        &orders,
        &mut violations,
    );
    let state = state.ok().and_then(convert::to_approval_state);
    violations.finish().map(|()| (page, ApprovalFilter { task, state, tree }))
}

pub(crate) fn decide_approval(request: &DecideApprovalRequest) -> Result<ApprovalId, Status> {
    let mut violations = Violations::new();
    let approval = violations.id("approval", &request.approval);
    let decided =
        matches!(Decision::try_from(request.decision), Ok(Decision::Approve | Decision::Reject));
    violations.require(decided, "decision", || "must be approve or reject".into());
    violations.chars("words", &request.words, WORDS_CHARS);
    let hash = &request.arguments_hash;
    let is_hash =
        hash.len() == 64 && hash.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    violations.require(hash.is_empty() || is_hash, "arguments_hash", || {
        "must be 64 hexadecimal digits in lower case, or empty".into()
    });
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, approval)
}
