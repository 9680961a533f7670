//! Policies.

use construct_domain::policy::invalid_patterns;
use construct_proto::v1::PolicyRule;

use crate::{convert, validate::Violations};

/// Checks the patterns of rules. Patterns beyond the limits are not compiled.
pub(super) fn check_policy(violations: &mut Violations, field: &str, rules: &[PolicyRule]) {
    if violations.concern(field) {
        return;
    }
    for (index, rule) in rules.iter().enumerate() {
        let Some(rule) = convert::to_rule(rule.clone()) else { continue };
        for (pattern, description) in invalid_patterns(&rule) {
            violations.add(format!("{field}[{index}].{pattern}"), description);
        }
    }
}
