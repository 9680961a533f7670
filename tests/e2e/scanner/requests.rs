//! Requests that are refused late or repeated.

use super::*;

#[tokio::test]
async fn refused_scan_leaves_no_task_and_can_be_retried() {
    let (mesh, github) = begin().await;
    commit(&github, "octo/ledger", "");
    mesh.scripted_agent("m", &json!([{"text": answer(&[valid_candidate()])}])).await.unwrap();
    connect(&mesh, &github, "work", Credential::Token(TOKEN.into())).await;
    // The connection is deleted between the creation of the task and of the scan.
    mesh.database
        .execute(
            "CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN DELETE FROM scan_connections; RETURN NULL; END $$;
             CREATE TRIGGER late AFTER INSERT ON budgets FOR EACH ROW EXECUTE FUNCTION late()",
        )
        .await;
    let client = mesh.client().unwrap();
    let spec = v1::ScanSpec { connection: "work".into(), ..scan_spec("octo/ledger", "m") };
    let request = v1::CreateScanRequest { spec: Some(spec), idempotency_key: "once".into() };
    let refused = client.scans().create_scan(request.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound, "{refused:?}");
    let tasks = client
        .tasks()
        .list_tasks(v1::ListTasksRequest::default())
        .await
        .unwrap()
        .into_inner()
        .tasks;
    let budgets = client
        .budgets()
        .list_budgets(v1::ListBudgetsRequest::default())
        .await
        .unwrap()
        .into_inner()
        .budgets;
    assert!(tasks.is_empty() && budgets.is_empty(), "{tasks:?} {budgets:?}");
    mesh.database.execute("DROP TRIGGER late ON budgets").await;
    connect(&mesh, &github, "work", Credential::Token(TOKEN.into())).await;
    let scan = client.scans().create_scan(request).await.unwrap().into_inner();
    let status = wait_for_phase(&mesh, &id(scan.metadata.as_ref()), Review).await;
    assert_eq!(status.candidates, 1, "{status:?}");
}

/// Waits until there are so many exploration tasks and budgets, which are deleted with their tasks.
async fn wait_for_entities(mesh: &Mesh, tasks: usize, budgets: usize) {
    let client = mesh.client().unwrap();
    until("tasks and budgets", SCAN_TIMEOUT, async || {
        let found = retry_unavailable(async || {
            client.tasks().list_tasks(v1::ListTasksRequest::default()).await
        })
        .await
        .tasks;
        let limits = retry_unavailable(async || {
            client.budgets().list_budgets(v1::ListBudgetsRequest::default()).await
        })
        .await
        .budgets;
        if (found.len(), limits.len()) == (tasks, budgets) { Ok(()) } else { Err((found, limits)) }
    })
    .await;
}

async fn delete(mesh: &Mesh, task: &str) {
    let request = v1::DeleteTaskRequest { task: task.to_owned(), ..Default::default() };
    mesh.client().unwrap().tasks().delete_task(request).await.unwrap();
}

#[tokio::test]
async fn repeated_request_is_answered_after_its_entities_are_deleted() {
    let (mesh, github) = begin().await;
    commit(&github, "octo/ledger", "");
    mesh.scripted_agent("m", &json!([{"text": answer(&[valid_candidate()])}])).await.unwrap();
    connect(&mesh, &github, "work", Credential::Token(TOKEN.into())).await;
    let scans = mesh.client().unwrap().scans();
    let spec = v1::ScanSpec { connection: "work".into(), ..scan_spec("octo/ledger", "m") };
    let request = v1::CreateScanRequest { spec: Some(spec), idempotency_key: "once".into() };
    let first = scans.clone().create_scan(request.clone()).await.unwrap().into_inner();
    let status = wait_for_phase(&mesh, &id(first.metadata.as_ref()), Review).await;
    wait_for_entities(&mesh, 1, 1).await;
    delete(&mesh, &status.task_id).await;
    let gone = v1::DeleteScanConnectionRequest { connection: "work".into(), ..Default::default() };
    scans.clone().delete_scan_connection(gone).await.unwrap();
    let again = scans.clone().create_scan(request.clone()).await.unwrap().into_inner();
    assert_eq!(again, first);
    // Nothing unused was left by it.
    wait_for_entities(&mesh, 0, 0).await;
    assert_eq!(
        scans
            .clone()
            .list_scans(v1::ListScansRequest::default())
            .await
            .unwrap()
            .into_inner()
            .scans
            .len(),
        1
    );
    // The key belongs to that request only.
    let other = v1::CreateScanRequest { spec: Some(scan_spec("octo/other", "m")), ..request };
    let refused = scans.clone().create_scan(other).await.unwrap_err();
    assert!(
        refused.code() == Code::InvalidArgument && refused.message().contains("idempotency_key"),
        "{refused}"
    );
    wait_for_entities(&mesh, 0, 0).await;
}

#[tokio::test]
async fn requests_with_one_key_create_one_scan_and_one_task() {
    let (mesh, github) = begin().await;
    commit(&github, "octo/ledger", "");
    mesh.scripted_agent("m", &json!([{"text": answer(&[valid_candidate()])}])).await.unwrap();
    // The holder of the key is blocked as long as a row is in a table.
    mesh.database
        .execute(
            "CREATE TABLE shut (is_shut boolean);
             INSERT INTO shut VALUES (true);
             CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN WHILE EXISTS (SELECT 1 FROM shut) LOOP PERFORM pg_sleep(0.05); END LOOP; RETURN NEW; END $$;
             CREATE TRIGGER wait AFTER INSERT ON idempotency_keys FOR EACH ROW WHEN (NEW.key = 'once') EXECUTE FUNCTION wait()",
        )
        .await;
    let waiting = async |event: &str| {
        until(event, SCAN_TIMEOUT, async || match mesh.database.waiting_statements(event).await {
            0 => Err("no statement waits"),
            _ => Ok(()),
        })
        .await;
    };
    let request = || v1::CreateScanRequest {
        spec: Some(scan_spec("octo/ledger", "m")),
        idempotency_key: "once".into(),
    };
    let scans = mesh.client().unwrap().scans();
    let mut one = scans.clone();
    let first = tokio::spawn(async move { one.create_scan(request()).await });
    waiting("PgSleep").await;
    // Its task is deleted before the second request arrives, which therefore creates another one.
    let client = mesh.client().unwrap();
    let tasks = client
        .tasks()
        .list_tasks(v1::ListTasksRequest::default())
        .await
        .unwrap()
        .into_inner()
        .tasks;
    delete(&mesh, &id(tasks[0].metadata.as_ref())).await;
    let mut two = scans.clone();
    let second = tokio::spawn(async move { two.create_scan(request()).await });
    // It has created its entities when it waits for the key.
    waiting("transactionid").await;
    wait_for_entities(&mesh, 1, 1).await;
    mesh.database.execute("DELETE FROM shut").await;
    let (first, second) =
        (first.await.unwrap().unwrap().into_inner(), second.await.unwrap().unwrap().into_inner());
    assert_eq!(first, second);
    wait_for_entities(&mesh, 0, 0).await;
    let status = wait_for_phase(&mesh, &id(first.metadata.as_ref()), v1::ScanPhase::Failed).await;
    assert!(status.reason.contains("was deleted"), "{status:?}");
}
