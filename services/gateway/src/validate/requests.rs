//! What each request is checked for. The limits are those of the comments in `proto/construct/v1`.

mod audit;
mod entities;
mod files;
mod identity;
mod model_tokens;
mod money;
mod policies;
mod recovery;
mod scans;
mod schedules;
mod secrets;
mod states;
mod tasks;
mod usage;

pub(crate) use audit::{export_audit_entries, list_audit_entries};
pub(crate) use entities::{
    create_agent, create_model, create_model_provider, delete, get, list_agents,
    list_model_providers, list_models, model_provider_fits, update_agent, update_model,
    update_model_provider,
};
pub(crate) use files::{
    PART_BYTES, create_file, delete_file, download_file, file, list_files, update_file, upload_part,
};
pub(crate) use identity::{
    create_api_key, create_invitation, create_organization, create_setup_code, delete_organization,
    exchange_setup_code, get_api_key, get_organization, list_api_keys, list_invitations,
    list_members, list_organizations, remove_member, revoke_api_key, revoke_invitation,
    update_api_key, update_member, update_organization,
};
pub(crate) use model_tokens::create_model_token;
pub(crate) use money::{
    budget, create_budget, get_costs, list_budgets, list_catalog_models, update_budget,
};
pub(crate) use policies::{decide_approval, get_approval, list_approvals};
pub(crate) use recovery::list_dead_letters;
pub(crate) use scans::{
    cancel_scan, compare_scans, create_scan, create_scan_connection, create_tools, list_candidates,
    list_repositories, list_scan_connections, list_scans, path_of, review_candidate, scan,
    watch_scan,
};
pub(crate) use schedules::{create_schedule, list_schedules, schedule, timing, update_schedule};
pub(crate) use secrets::{
    create_secret, delete_secret, get_secret, list_secrets, secret_fits, update_secret,
};
pub(crate) use states::{delete_state, get_state, list_state_versions, put_state, watch_states};
pub(crate) use tasks::{
    cancel_task, change_message, create_message, create_task, edit_message, fork_task,
    list_messages, list_tasks, rewind_task, subscribe, task_intent, update_message, update_task,
};
pub(crate) use usage::{get_quota, list_usage, update_quota};

#[cfg(test)]
mod tests;
