//! Requests that name two resources: one of the caller and one of another organization. The caller
//! is authorized by the first, so only the check of the second refuses the request.

use super::*;

/// Requests that name a resource of `own` and one of `other`. Those that cut the transcript of a
/// task come last.
fn mixed_requests(own: &Ids, other: &Ids) -> Vec<(&'static str, Value)> {
    let own = |what: &str| own[what].clone();
    let other = |what: &str| other[what].clone();
    let text = json!([{"text": {"text": "hello"}}]);
    let attachment = json!([{"attachment": {"file": other("file")}}]);
    let agent = |name: &str, more: Value| {
        let mut spec = json!({"name": name, "model": own("model")});
        spec.as_object_mut()
            .expect("an object")
            .extend(more.as_object().expect("an object").clone());
        json!({"spec": spec})
    };
    vec![
        ("AgentService.CreateAgent", agent("both-1", json!({"secrets": [other("secret")]}))),
        ("AgentService.CreateAgent", agent("both-2", json!({"scriptModels": [other("model")]}))),
        ("AgentService.UpdateAgent", json!({"agent": own("agent"), "model": other("model")})),
        (
            "AgentService.UpdateAgent",
            json!({"agent": own("agent"), "secrets": {"secrets": [other("secret")]}}),
        ),
        (
            "AgentService.UpdateAgent",
            json!({"agent": own("agent"), "scriptModels": {"scriptModels": [other("model")]}}),
        ),
        (
            "BudgetService.CreateBudget",
            json!({"spec": {"task": other("task"), "period": "BUDGET_PERIOD_MONTH", "limitPicoUsd": "5"}}),
        ),
        (
            "MessageService.CreateMessage",
            json!({"spec": {"task": own("task"), "blocks": attachment}}),
        ),
        ("MessageService.UpdateMessage", json!({"message": own("message"), "blocks": attachment})),
        (
            "ModelService.CreateModel",
            json!({"spec": {"name": "both", "provider": own("provider"), "fallbacks": [{"model": other("model")}]}}),
        ),
        (
            "ModelService.UpdateModel",
            json!({"model": own("model"), "fallbacks": {"fallbacks": [{"model": other("model")}]}}),
        ),
        ("ModelTokenService.CreateModelToken", json!({"models": [own("model"), other("model")]})),
        (
            "ModelTokenService.CreateModelToken",
            json!({"models": [own("model")], "task": other("task")}),
        ),
        ("ScanService.CompareScans", json!({"before": own("scan"), "after": other("scan")})),
        ("ScanService.CompareScans", json!({"before": other("scan"), "after": own("scan")})),
        (
            "ScanService.CreateScan",
            json!({"spec": {"github": "a/b", "model": own("model"), "connection": other("connection")}}),
        ),
        (
            "ScanService.CreateTools",
            json!({"scan": own("scan"), "candidates": [other("candidate")]}),
        ),
        (
            "ScheduleService.CreateSchedule",
            json!({"spec": {"name": "both-1", "task": other("task"), "blocks": text, "cron": "0 9 * * *"}}),
        ),
        (
            "ScheduleService.CreateSchedule",
            json!({"spec": {"name": "both-2", "agent": own("agent"), "blocks": attachment, "cron": "0 9 * * *"}}),
        ),
        (
            "ScheduleService.UpdateSchedule",
            json!({"schedule": own("schedule"), "blocks": attachment}),
        ),
        ("TaskService.UpdateTask", json!({"task": own("task"), "agent": other("agent")})),
        ("TaskService.ForkTask", json!({"task": own("task"), "message": other("message")})),
        ("TaskService.ForkTask", json!({"task": other("task"), "message": own("message")})),
        ("MessageService.EditMessage", json!({"message": own("message"), "blocks": attachment})),
        ("TaskService.RewindTask", json!({"task": own("task"), "message": other("message")})),
        ("TaskService.RewindTask", json!({"task": other("task"), "message": own("message")})),
    ]
}

/// The answers of all methods that read, to the owner of these resources.
async fn read_all(gateway: &Gateway, key: &str, ids: &Ids) -> BTreeMap<String, Bytes> {
    // The first three change with each call; the others ask workers, which do not run here.
    const EXCLUDED: [&str; 5] =
        ["AuditService.", "KeyService.", "UsageService.", ".ListRepositories", ".ListVendorModels"];
    let (requests, mut all) = (reference_requests(ids), BTreeMap::new());
    for (method, access) in methods() {
        let name = method.full_name().trim_start_matches("construct.v1.");
        let reads = name.contains(".Get") || name.contains(".List");
        if !reads
            || access == Access::Operator
            || EXCLUDED.iter().any(|excluded| name.contains(excluded))
        {
            continue;
        }
        let body = requests
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
    let gateway = Gateway::start_with(login_required()).await;
    let local = (OrganizationId::LOCAL, UserId::LOCAL);
    let (foreign_key_id, foreign_key) =
        create_key(&gateway, local, Role::Owner, &[Scope::Admin], None).await;
    let foreign = create_resources(&gateway, &foreign_key, foreign_key_id, local).await;
    let elsewhere = create_organization(&gateway, "elsewhere").await;
    let (own_key_id, own_key) =
        create_key(&gateway, elsewhere, Role::Owner, &[Scope::Admin], None).await;
    let own = create_resources(&gateway, &own_key, own_key_id, elsewhere).await;
    let unknown: Ids = foreign.iter().map(|(what, id)| (*what, unknown_id(id))).collect();
    let before = (
        read_all(&gateway, &own_key, &own).await,
        read_all(&gateway, &foreign_key, &foreign).await,
    );
    for ((name, body), (_, unknown)) in
        mixed_requests(&own, &foreign).iter().zip(&mixed_requests(&own, &unknown))
    {
        let method = method_named(name);
        let refusal = call(&gateway, &method, body, Some(&own_key)).await.expect_err(name);
        let expected = if body.to_string().contains("attachment") {
            Code::InvalidArgument
        } else {
            Code::NotFound
        };
        assert_eq!(refusal.code(), expected, "{name} {body}: {refusal:?}");
        let message = foreign
            .values()
            .fold(refusal.message().to_owned(), |message, id| message.replace(id, &unknown_id(id)));
        let other = call(&gateway, &method, unknown, Some(&own_key)).await.expect_err(name);
        assert_eq!((other.code(), other.message()), (expected, message.as_str()), "{name} {body}");
    }
    let after = (
        read_all(&gateway, &own_key, &own).await,
        read_all(&gateway, &foreign_key, &foreign).await,
    );
    assert_eq!(before, after);
    // Only the second resource was refused: with an own one in its place no request fails so.
    for (name, body) in mixed_requests(&own, &own) {
        let answer = call(&gateway, &method_named(name), &body, Some(&own_key)).await;
        let message = answer.as_ref().err().map(Status::message).unwrap_or_default();
        assert!(
            !message.contains("not found") && !message.contains("is no file"),
            "{name} {body}: {answer:?}"
        );
    }
}
