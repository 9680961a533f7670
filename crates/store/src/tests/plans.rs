//! Plans of statements that would be slow without an index, on tables that are large enough to show
//! it.

use serde_json::Value;

use super::*;

/// A ledger of 110,000 calls, and 18,000 tasks: 400 trees of one root with nine subtasks, each of
/// which has four.
async fn filled() -> (Fixture, Uuid, Uuid) {
    let f = Fixture::new().await;
    let root = f.task().await.uuid();
    let below = |level: &str, width: u32| {
        format!(
            "INSERT INTO tasks SELECT (jsonb_populate_record(t, jsonb_build_object('id', gen_random_uuid(),
                 'root_id', t.root_id, 'parent_id', t.id, 'ancestors', to_jsonb(t.ancestors || t.id)))).*
             FROM tasks t, generate_series(1, {width}) WHERE {level}"
        )
    };
    let mut connection = f.store.pool.acquire().await.expect("a connection");
    for statement in [
        // No statement timeout: no request writes that many rows, and the machine may be busy.
        "SET statement_timeout = '2min'".to_owned(),
        "INSERT INTO tasks SELECT (jsonb_populate_record(t, jsonb_build_object('id', u.id, 'root_id', u.id))).*
         FROM tasks t, (SELECT gen_random_uuid() AS id FROM generate_series(1, 399)) u"
            .to_owned(),
        below("t.parent_id IS NULL", 9),
        below("cardinality(t.ancestors) = 1", 4),
        "INSERT INTO step_usage (step_id, organization_id, task_id, root_id, tree, model_id, purpose, input_tokens, output_tokens,
             cache_read_tokens, cache_write_tokens, cost_pico_usd, created_at)
         SELECT gen_random_uuid(), t.organization_id, t.id, t.root_id, CASE WHEN t.parent_id IS NOT NULL THEN t.ancestors || t.id END,
             gen_random_uuid(), 'turn', 1, 1, 1, 1, 1, now() FROM tasks t, generate_series(1, 6)"
            .to_owned(),
        "ANALYZE tasks, step_usage".to_owned(),
        "RESET statement_timeout".to_owned(),
    ] {
        sqlx::query(sqlx::AssertSqlSafe(statement)).execute(&mut *connection).await.expect("filled");
    }
    drop(connection);
    let counts: (i64, i64) =
        sqlx::query_as("SELECT (SELECT count(*) FROM step_usage), (SELECT count(*) FROM tasks)")
            .fetch_one(&f.store.pool)
            .await
            .expect("counted");
    assert!(counts.0 >= 100_000 && counts.1 >= 18_000, "{counts:?}");
    let child = sqlx::query_scalar("SELECT id FROM tasks WHERE parent_id = $1 LIMIT 1").bind(root);
    let child = child.fetch_one(&f.store.pool).await.expect("there");
    (f, root, child)
}

/// The generic plan of a statement, which is the worst that PostgreSQL may choose for a prepared
/// one.
async fn plan(f: &Fixture, statement: &str, arguments: &str) -> String {
    let mut connection = f.store.pool.acquire().await.expect("a connection");
    for statement in [
        "SET plan_cache_mode = force_generic_plan".to_owned(),
        format!("PREPARE looked_at AS {statement}"),
    ] {
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement))
            .execute(&mut *connection)
            .await
            .expect("prepared");
    }
    let explain = format!("EXPLAIN (FORMAT JSON) EXECUTE looked_at({arguments})");
    let plan: Value = sqlx::query_scalar(sqlx::AssertSqlSafe(explain))
        .fetch_one(&mut *connection)
        .await
        .expect("explained");
    sqlx::raw_sql("DEALLOCATE looked_at; RESET plan_cache_mode")
        .execute(&mut *connection)
        .await
        .expect("tidied up");
    format!("{plan:#}")
}

fn reads_all_of(plan: &str, table: &str) -> bool {
    let plan: Value = serde_json::from_str(plan).expect("a plan");
    has_scan(&plan[0]["Plan"], table)
}

fn has_scan(node: &Value, table: &str) -> bool {
    let is_scan = node["Node Type"] == "Seq Scan" && node["Relation Name"] == table;
    is_scan
        || node["Plans"]
            .as_array()
            .is_some_and(|plans| plans.iter().any(|plan| has_scan(plan, table)))
}

/// Prepared statements, including those of foreign keys, are planned once, possibly before the
/// first task exists.
#[tokio::test]
async fn plan_cached_on_an_empty_table_still_uses_the_primary_key() {
    let f = Fixture::new().await;
    // The statement of PostgreSQL's `RI_FKey_check`.
    let check =
        "SELECT 1 FROM ONLY tasks x WHERE organization_id = $1 AND id = $2 FOR KEY SHARE OF x";
    let plan = plan(&f, check, &format!("'{}', '{}'", ORG.uuid(), Uuid::nil())).await;
    assert!(plan.contains("tasks_tenant_key"), "{plan}");
}

#[tokio::test]
async fn task_queries_use_indexes() {
    let (f, root, child) = filled().await;
    for task in [root, child] {
        let arguments = format!("'{}', NULL, '{task}', NULL, NULL, NULL, 'all', 1", ORG.uuid());
        let plan = plan(&f, &crate::cost::tests::statement_of_task(), &arguments).await;
        assert!(!reads_all_of(&plan, "step_usage"), "{plan}");
        assert!(
            plan.contains("step_usage_tree_idx") && plan.contains("step_usage_root_idx"),
            "{plan}"
        );
    }
    let [of, page] = crate::task::subtask::state::tests::statements();
    for (statement, arguments) in [
        (of, format!("'{}', '{root}', ARRAY['{child}']::uuid[]", ORG.uuid())),
        (page, format!("'{}', '{root}', NULL, 100", ORG.uuid())),
    ] {
        let plan = plan(&f, &statement, &arguments).await;
        assert!(!reads_all_of(&plan, "tasks") && plan.contains("tasks_parent_idx"), "{plan}");
    }
    let listed = crate::task::tests::statement_of_subtasks().expect("a statement");
    let arguments = format!(
        "'{}', NULL, NULL, NULL, NULL, NULL, '-infinity', '{}', 100, '{root}'",
        ORG.uuid(),
        Uuid::nil()
    );
    let below = (
        crate::task::subtask::state::tests::descendants_statement(),
        format!("'{}', '{root}'", ORG.uuid()),
    );
    for (statement, arguments) in [(listed, arguments), below] {
        let plan = plan(&f, &statement, &arguments).await;
        assert!(!reads_all_of(&plan, "tasks") && plan.contains("tasks_parent_idx"), "{plan}");
        assert!(!plan.contains("tasks_created_idx") && !reads_all_of(&plan, "messages"), "{plan}");
    }
    let below = f.store.task_descendants(ORG, TaskId::from_uuid(root)).await.expect("read");
    assert_eq!((below.count, below.at_work), (45, 0));
}

#[tokio::test]
async fn approvals_of_a_tree_are_read_by_task_index() {
    let (f, root, child) = filled().await;
    let mut connection = f.store.pool.acquire().await.expect("a connection");
    for statement in [
        "SET statement_timeout = '2min'",
        "INSERT INTO approvals (id, organization_id, task_id, step_id, script, number, tool, arguments, arguments_size, arguments_hash,
             reason, state, decided_at, expires_at, created_at, updated_at)
         SELECT gen_random_uuid(), t.organization_id, t.id, gen_random_uuid(), 0, 1, 'fetch', '{}', 2, 'h', '',
             CASE WHEN n % 3 = 0 THEN 'pending' ELSE 'approved' END, CASE WHEN n % 3 = 0 THEN NULL ELSE now() END, now(), now(), now()
         FROM tasks t, generate_series(1, 3) n",
        "ANALYZE approvals",
        "RESET statement_timeout",
    ] {
        sqlx::query(sqlx::AssertSqlSafe(statement)).execute(&mut *connection).await.expect("filled");
    }
    drop(connection);
    let statement = crate::approval::tests::statement_of_tree().expect("a statement");
    let page = crate::Page { limit: 100, order: crate::Order::default(), after: None };
    for (task, count) in [(root, 46), (child, 5)] {
        let filter = crate::ApprovalFilter {
            tree: Some(TaskId::from_uuid(task)),
            state: Some(construct_domain::approval::ApprovalState::Pending),
            ..crate::ApprovalFilter::default()
        };
        let found = f.store.approval_list(ORG, &filter, &page).await.expect("they are read");
        assert_eq!(found.len(), count);
        let arguments = format!(
            "'{}', '{task}', NULL, 'pending', 'infinity', '{}', 100",
            ORG.uuid(),
            Uuid::max()
        );
        let plan = plan(&f, &statement, &arguments).await;
        assert!(!reads_all_of(&plan, "tasks") && !reads_all_of(&plan, "approvals"), "{plan}");
        assert!(plan.contains("approvals_task_idx") && plan.contains("tasks_parent_idx"), "{plan}");
        // Nor does it read all approvals of the organization.
        assert!(
            !plan.contains("approvals_created_idx") && !plan.contains("approvals_pending_idx"),
            "{plan}"
        );
    }
}

/// The ledger and the results of a year, of which a day or a month is read.
#[tokio::test]
async fn usage_of_a_period_uses_an_index() {
    let (f, ..) = filled().await;
    let mut connection = f.store.pool.acquire().await.expect("a connection");
    for statement in [
        "SET statement_timeout = '2min'",
        "UPDATE step_usage SET created_at = now() - random() * interval '365 days'",
        r#"INSERT INTO messages (id, organization_id, task_id, arrival, position, source, content, step_id, created_at, updated_at)
           SELECT gen_random_uuid(), t.organization_id, t.id, 0, 1, 'system',
               '{"blocks": [{"kind": "code_interpreter_result", "payload": {"id": "c"}}]}', gen_random_uuid(),
               now() - random() * interval '365 days', now()
           FROM tasks t"#,
        r#"INSERT INTO messages (id, organization_id, task_id, arrival, position, source, content, step_id, created_at, updated_at)
           SELECT gen_random_uuid(), t.organization_id, t.id, 0, 2, 'assistant', '{"blocks": []}', gen_random_uuid(), now(), now()
           FROM tasks t"#,
        "UPDATE tasks SET created_at = now() - random() * interval '365 days'",
        "ANALYZE tasks, step_usage, messages, events",
        "RESET statement_timeout",
    ] {
        sqlx::raw_sql(statement).execute(&mut *connection).await.expect("filled");
    }
    drop(connection);
    let org = ORG.uuid();
    let [models, tools] = crate::ledger::tests::statements();
    let time = "now() - interval '1 day', now()";
    let arguments = format!(
        "'{org}', {time}, NULL, NULL, 'UTC', true, true, true, true, NULL, NULL, NULL, 100, true, NULL, NULL"
    );
    let of_models = plan(&f, &models, &arguments).await;
    assert!(
        !reads_all_of(&of_models, "step_usage") && of_models.contains("step_usage_created_idx"),
        "{of_models}"
    );
    let arguments = format!(
        "'{org}', {time}, NULL, 'UTC', true, true, true, NULL, NULL, NULL, 100, NULL, true, NULL, NULL"
    );
    let of_tools = plan(&f, &tools, &arguments).await;
    assert!(
        !reads_all_of(&of_tools, "messages") && of_tools.contains("messages_runs_idx"),
        "{of_tools}"
    );
    let day = "now() - interval '1 day'";
    let arguments = format!(
        "'{org}', true, true, true, true, true, {day}, now() - interval '30 days', '{org}', now(), now(), '{org}'"
    );
    let counts = plan(&f, &crate::quota::tests::statement(), &arguments).await;
    for table in ["step_usage", "messages", "tasks"] {
        assert!(!reads_all_of(&counts, table), "{table}: {counts}");
    }
    for index in ["step_usage_created_idx", "messages_runs_idx", "tasks_created_idx"] {
        assert!(counts.contains(index), "{index}: {counts}");
    }
    // The same for all keys at once.
    let arguments = format!(
        "'{org}', true, true, true, true, {day}, now() - interval '30 days', '{org}', now(), now(), '{org}', true"
    );
    let counts = plan(&f, &crate::quota::tests::key_statement(), &arguments).await;
    for table in ["step_usage", "messages", "tasks"] {
        assert!(!reads_all_of(&counts, table), "{table}: {counts}");
    }
}
