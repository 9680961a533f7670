//! Requests that name two things: one's own, and beside it what belongs to another organization.
//! Who owns the first is let in, so what keeps the second from them is each look that is taken at
//! it.

use super::*;

/// Requests that name, beside what is one's own, something of `of`. Those that cut a task's
/// transcript stand last.
fn naming_both(own: &Ids, of: &Ids) -> Vec<(&'static str, Value)> {
    let own = |what: &str| own[what].clone();
    let of = |what: &str| of[what].clone();
    let text = json!([{"text": {"text": "hello"}}]);
    let shown = json!([{"attachment": {"file": of("file")}}]);
    let agent = |name: &str, more: Value| {
        let mut spec = json!({"name": name, "model": own("model")});
        spec.as_object_mut()
            .expect("an object")
            .extend(more.as_object().expect("an object").clone());
        json!({"spec": spec})
    };
    vec![
        ("AgentService.CreateAgent", agent("both-1", json!({"secrets": [of("secret")]}))),
        ("AgentService.CreateAgent", agent("both-2", json!({"scriptModels": [of("model")]}))),
        ("AgentService.UpdateAgent", json!({"agent": own("agent"), "model": of("model")})),
        (
            "AgentService.UpdateAgent",
            json!({"agent": own("agent"), "secrets": {"secrets": [of("secret")]}}),
        ),
        (
            "AgentService.UpdateAgent",
            json!({"agent": own("agent"), "scriptModels": {"scriptModels": [of("model")]}}),
        ),
        (
            "BudgetService.CreateBudget",
            json!({"spec": {"task": of("task"), "period": "BUDGET_PERIOD_MONTH", "limitPicoUsd": "5"}}),
        ),
        ("MessageService.CreateMessage", json!({"spec": {"task": own("task"), "blocks": shown}})),
        ("MessageService.UpdateMessage", json!({"message": own("message"), "blocks": shown})),
        (
            "ModelService.CreateModel",
            json!({"spec": {"name": "both", "provider": own("provider"), "fallbacks": [{"model": of("model")}]}}),
        ),
        (
            "ModelService.UpdateModel",
            json!({"model": own("model"), "fallbacks": {"fallbacks": [{"model": of("model")}]}}),
        ),
        ("ModelTokenService.CreateModelToken", json!({"models": [own("model"), of("model")]})),
        (
            "ModelTokenService.CreateModelToken",
            json!({"models": [own("model")], "task": of("task")}),
        ),
        ("ScanService.CompareScans", json!({"before": own("scan"), "after": of("scan")})),
        ("ScanService.CompareScans", json!({"before": of("scan"), "after": own("scan")})),
        (
            "ScanService.CreateScan",
            json!({"spec": {"github": "a/b", "model": own("model"), "connection": of("connection")}}),
        ),
        ("ScanService.CreateTools", json!({"scan": own("scan"), "candidates": [of("candidate")]})),
        (
            "ScheduleService.CreateSchedule",
            json!({"spec": {"name": "both-1", "task": of("task"), "blocks": text, "cron": "0 9 * * *"}}),
        ),
        (
            "ScheduleService.CreateSchedule",
            json!({"spec": {"name": "both-2", "agent": own("agent"), "blocks": shown, "cron": "0 9 * * *"}}),
        ),
        ("ScheduleService.UpdateSchedule", json!({"schedule": own("schedule"), "blocks": shown})),
        ("TaskService.UpdateTask", json!({"task": own("task"), "agent": of("agent")})),
        ("TaskService.ForkTask", json!({"task": own("task"), "message": of("message")})),
        ("TaskService.ForkTask", json!({"task": of("task"), "message": own("message")})),
        ("MessageService.EditMessage", json!({"message": own("message"), "blocks": shown})),
        ("TaskService.RewindTask", json!({"task": own("task"), "message": of("message")})),
        ("TaskService.RewindTask", json!({"task": of("task"), "message": own("message")})),
    ]
}

/// All that an organization is shown of what it has, by the method that shows it.
async fn shown(gateway: &Gateway, key: &str, ids: &Ids) -> BTreeMap<String, Bytes> {
    // What is told of calls changes with each of them, and workers are not here to be asked.
    const LEFT_OUT: [&str; 5] =
        ["AuditService.", "KeyService.", "UsageService.", ".ListRepositories", ".ListVendorModels"];
    let (naming, mut all) = (naming(ids), BTreeMap::new());
    for (method, access) in methods() {
        let name = method.full_name().trim_start_matches("construct.v1.");
        let reads = name.contains(".Get") || name.contains(".List");
        if !reads || access == Access::Operator || LEFT_OUT.iter().any(|left| name.contains(left)) {
            continue;
        }
        let body = naming
            .iter()
            .find(|(known, _)| *known == name)
            .map_or_else(|| json!({}), |(_, body)| body.clone());
        let answer = call(gateway, &method, &body, Some(key)).await;
        all.insert(name.to_owned(), answer.unwrap_or_else(|status| panic!("{name}: {status:?}")));
    }
    assert!(all.len() > 25, "{:?}", all.keys());
    all
}

#[tokio::test]
async fn mixed_references_to_foreign_resources_are_refused() {
    let gateway = Gateway::start_with(required()).await;
    let local = (OrganizationId::LOCAL, UserId::LOCAL);
    let (their_key_id, their_key) = key(&gateway, local, Role::Owner, &[Scope::Admin], None).await;
    let theirs = belongings(&gateway, &their_key, their_key_id, local).await;
    let elsewhere = other(&gateway, "elsewhere").await;
    let (own_key_id, own_key) = key(&gateway, elsewhere, Role::Owner, &[Scope::Admin], None).await;
    let own = belongings(&gateway, &own_key, own_key_id, elsewhere).await;
    let nowhere: Ids = theirs.iter().map(|(what, id)| (*what, invented(id))).collect();
    let before =
        (shown(&gateway, &own_key, &own).await, shown(&gateway, &their_key, &theirs).await);
    for ((name, body), (_, unknown)) in
        naming_both(&own, &theirs).iter().zip(&naming_both(&own, &nowhere))
    {
        let method = method_named(name);
        let refusal = call(&gateway, &method, body, Some(&own_key)).await.expect_err(name);
        let expected = if body.to_string().contains("attachment") {
            Code::InvalidArgument
        } else {
            Code::NotFound
        };
        assert_eq!(refusal.code(), expected, "{name} {body}: {refusal:?}");
        let said = theirs
            .values()
            .fold(refusal.message().to_owned(), |said, id| said.replace(id, &invented(id)));
        let other = call(&gateway, &method, unknown, Some(&own_key)).await.expect_err(name);
        assert_eq!((other.code(), other.message()), (expected, said.as_str()), "{name} {body}");
    }
    let after = (shown(&gateway, &own_key, &own).await, shown(&gateway, &their_key, &theirs).await);
    assert_eq!(before, after);
    // It was for the second thing alone: with one's own in its place none of them is refused like
    // this.
    for (name, body) in naming_both(&own, &own) {
        let answer = call(&gateway, &method_named(name), &body, Some(&own_key)).await;
        let words = answer.as_ref().err().map(Status::message).unwrap_or_default();
        assert!(
            !words.contains("not found") && !words.contains("is no file"),
            "{name} {body}: {answer:?}"
        );
    }
}
