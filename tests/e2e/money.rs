//! Budgets limit spending, costs are reported, and calls outside turns are reserved and recorded.

use std::time::Duration;

use construct_bus::{User, subject};
use construct_proto::{mesh::v1 as mesh, v1};
use construct_tests::{
    client::{self, TURN_TIMEOUT},
    mesh::Mesh,
    transcript,
    vendor::{Reply, VendorServer, openai},
    wait::until,
};
use futures::StreamExt as _;
use prost::Message as _;
use serde_json::json;
use uuid::Uuid;

const DOLLAR: i64 = 1_000_000_000_000;

async fn budget(client: &client::Client, spec: v1::BudgetSpec) -> v1::Budget {
    let request = v1::CreateBudgetRequest { spec: Some(spec), ..Default::default() };
    client.budgets().create_budget(request).await.unwrap().into_inner()
}

async fn budget_status(client: &client::Client, budget: &v1::Budget) -> v1::BudgetStatus {
    let request = v1::GetBudgetRequest { budget: client::id(budget.metadata.as_ref()) };
    client.budgets().get_budget(request).await.unwrap().into_inner().status.unwrap()
}

fn cost(task: &v1::Task) -> i64 {
    task.status.as_ref().unwrap().usage.unwrap().cost_pico_usd
}

#[tokio::test]
async fn exhausted_budget_ends_turn_and_raised_budget_continues_it() {
    let mesh = Mesh::start().await.unwrap();
    let script = json!({"turns": [
        {"code": [["6 * 7"]], "usage": {"input": 1000, "output": 200}},
        {"text": "It is {{last_result}}.", "usage": {"input": 2000, "output": 10}},
        {"text": "Still {{last_result}}.", "usage": {"input": 3000, "output": 10}},
    ]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let client = mesh.client().unwrap();
    let monthly = v1::BudgetSpec {
        agent: "worker".into(),
        period: v1::BudgetPeriod::Month.into(),
        limit_pico_usd: 2 * DOLLAR,
        ..Default::default()
    };
    let monthly = budget(&client, monthly).await;
    let spec = v1::TaskSpec { agent: "worker".into(), title: "Sums".into(), ..Default::default() };
    let conversation = client.create_task_with(spec).await.unwrap();
    let task = conversation.ask("What is six times seven?").await;
    assert_eq!(task.status.as_ref().unwrap().last_outcome(), v1::TurnOutcome::Completed);
    let spent = 3000 * 3_000_000 + 210 * 15_000_000;
    assert_eq!(cost(&task), spent);
    let seen = budget_status(&client, &monthly).await;
    assert_eq!((seen.spent_pico_usd, seen.reserved_pico_usd), (spent, 0), "settled to what it was");

    // A new budget of the task includes what the task has spent, and cannot cover the next call.
    let own = v1::BudgetSpec {
        task: conversation.id().to_owned(),
        period: v1::BudgetPeriod::Total.into(),
        limit_pico_usd: DOLLAR / 50,
        ..Default::default()
    };
    let own = budget(&client, own).await;
    assert_eq!(own.status.as_ref().unwrap().spent_pico_usd, spent);
    let recorder = conversation.record();
    let message = conversation.submit("And now?").await;
    let task = conversation.wait_until_idle().await;
    let status = task.status.clone().unwrap();
    assert_eq!(status.last_outcome(), v1::TurnOutcome::Failed);
    let error = status.last_error.unwrap();
    assert_eq!(error.code, "BUDGET_EXHAUSTED");
    let words = "the budget of the task is exhausted: $0.02 limit, $0.01215 spent, up to $0.";
    assert!(error.message.starts_with(words), "{}", error.message);
    assert_eq!(cost(&task), spent, "nothing was called");
    let request = v1::GetMessageRequest { message: client::id(message.metadata.as_ref()) };
    let message = client.messages().get_message(request).await.unwrap().into_inner();
    assert_eq!(transcript::status(&message).error, error.message);
    let why = conversation.explain().await.unwrap();
    assert!(why.waiting_for.contains("the budget of the task is exhausted"), "{why:?}");
    assert!(why.released_by.contains("raising the budget"), "{why:?}");
    recorder
        .wait_until("the error to be published", |events| {
            let told = |event: &v1::Event| match &event.payload {
                Some(v1::event::Payload::Error(error)) => error.code == "BUDGET_EXHAUSTED",
                _ => false,
            };
            events.iter().any(told)
        })
        .await;
    let seen = budget_status(&client, &monthly).await;
    assert_eq!(
        (seen.spent_pico_usd, seen.reserved_pico_usd),
        (spent, 0),
        "a refused call keeps nothing set aside"
    );

    let raise = v1::UpdateBudgetRequest {
        budget: client::id(own.metadata.as_ref()),
        limit_pico_usd: 5 * DOLLAR,
        ..Default::default()
    };
    client.budgets().update_budget(raise).await.unwrap();
    let task = conversation.ask("Now there is money.").await;
    assert_eq!(task.status.as_ref().unwrap().last_outcome(), v1::TurnOutcome::Completed);
    let transcript = conversation.transcript().await;
    assert_eq!(
        transcript.answers().last().map(String::as_str),
        Some("Still 42."),
        "{}",
        transcript.show()
    );
    let whole = spent + 3000 * 3_000_000 + 10 * 15_000_000;
    assert_eq!(cost(&task), whole);
    for budget in [&own, &monthly] {
        let seen = budget_status(&client, budget).await;
        assert_eq!((seen.spent_pico_usd, seen.reserved_pico_usd), (whole, 0));
    }

    let request = v1::GetCostsRequest { group: v1::CostGroup::Task.into(), ..Default::default() };
    let costs = client.budgets().get_costs(request).await.unwrap().into_inner();
    assert_eq!(costs.costs.len(), 1);
    let row = &costs.costs[0];
    assert_eq!((row.key.as_str(), row.name.as_str(), row.calls), (conversation.id(), "Sums", 3));
    assert_eq!(row.usage.unwrap().cost_pico_usd, whole);
    assert_eq!(costs.total.unwrap().usage, row.usage);
}

#[tokio::test]
async fn concurrent_tasks_stay_within_their_agents_budget() {
    let mesh = Mesh::start().await.unwrap();
    // Each answer takes a while, so that all of them are in flight together.
    let script = json!({"turns": [{"text": "word ".repeat(40), "tokens_per_second": 40, "usage": {"input": 10, "output": 10}}]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let client = mesh.client().unwrap();
    let spec = v1::BudgetSpec {
        agent: "worker".into(),
        period: v1::BudgetPeriod::Total.into(),
        limit_pico_usd: DOLLAR,
        ..Default::default()
    };
    let whole = budget(&client, spec).await;
    let mut conversations = Vec::new();
    for _ in 0..12 {
        let spec =
            v1::TaskSpec { agent: "worker".into(), title: "One".into(), ..Default::default() };
        conversations.push(client.create_task_with(spec).await.unwrap());
    }
    for conversation in &conversations {
        conversation.submit("Go.").await;
    }
    let mut most = 0;
    until("every task to settle", TURN_TIMEOUT, async || {
        most = most.max(budget_status(&client, &whole).await.reserved_pico_usd);
        let mut settled = 0;
        for conversation in &conversations {
            let status = conversation.task().await.unwrap().status.unwrap();
            settled += usize::from(status.last_outcome() != v1::TurnOutcome::Unspecified);
        }
        if settled == conversations.len() { Ok(()) } else { Err(format!("{settled} are settled")) }
    })
    .await;
    let (mut completed, mut refused) = (0, 0);
    for conversation in &conversations {
        let status = conversation.task().await.unwrap().status.unwrap();
        match (status.last_outcome(), status.last_error) {
            (v1::TurnOutcome::Completed, _) => completed += 1,
            (_, Some(error)) if error.code == "BUDGET_EXHAUSTED" => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(completed >= 1 && refused >= 1, "{completed} completed, {refused} were refused");
    assert!(most <= DOLLAR, "{most}");
    let seen = budget_status(&client, &whole).await;
    let each = 10 * 3_000_000 + 10 * 15_000_000;
    assert_eq!((seen.spent_pico_usd, seen.reserved_pico_usd), (completed * each, 0));
}

#[tokio::test]
async fn calls_outside_turns_are_reserved_and_recorded_once() {
    let mesh = Mesh::start().await.unwrap();
    let metadata = mesh
        .scripted_agent("worker", &json!({"turns": [{"text": "x"}]}))
        .await
        .unwrap()
        .metadata
        .unwrap();
    let mut expires = metadata.created_at.unwrap();
    expires.seconds += 3600;
    let client = mesh.client().unwrap();
    let bus = mesh.nats.bus_for(User::Providers).await;
    let address = subject::Spending { organization: metadata.organization_id.parse().unwrap() };
    let organization = metadata.organization_id;
    let patience = Duration::from_secs(5);

    let lookup = |model: &str| mesh::ModelLookup {
        organization_id: organization.clone(),
        model: model.to_owned(),
    };
    let found = bus.ask(&subject::Models, &lookup("worker"), patience).await.unwrap();
    let model = found.model.unwrap();
    assert_eq!(
        (found.provider.unwrap().r#type(), model.max_output_tokens),
        (v1::ModelProviderType::Scripted, 8192)
    );
    assert_eq!(model.prices.unwrap().output, 15_000_000);
    assert!(
        bus.ask(&subject::Models, &lookup("nobody"), patience).await.unwrap().provider.is_none()
    );

    let reserve = |amount| mesh::BudgetReserve {
        reservation_id: Uuid::now_v7().to_string(),
        organization_id: organization.clone(),
        amount_pico_usd: amount,
        expires_at: Some(expires),
        token_id: "token-1".into(),
        token_budget_pico_usd: 2 * DOLLAR,
        ..Default::default()
    };
    let first = reserve(DOLLAR * 3 / 2);
    assert_eq!(bus.ask(&subject::Budgets, &first, patience).await.unwrap().refusal, "");
    let refused = bus.ask(&subject::Budgets, &reserve(DOLLAR), patience).await.unwrap().refusal;
    assert!(refused.starts_with("the budget of the token is exhausted: $2.00 limit"), "{refused}");

    let report = mesh::SpendingReport {
        call_id: Uuid::now_v7().to_string(),
        reservation_id: first.reservation_id.clone(),
        organization_id: organization.clone(),
        task_id: String::new(),
        api_key_id: String::new(),
        model_id: model.id.clone(),
        usage: Some(v1::Usage {
            output_tokens: 9,
            cost_pico_usd: DOLLAR / 2,
            ..Default::default()
        }),
        purpose: "llm.ask".into(),
    };
    for _ in 0..2 {
        bus.publish(&address, &report).await.unwrap();
    }
    let costs = async || {
        let request =
            v1::GetCostsRequest { group: v1::CostGroup::Purpose.into(), ..Default::default() };
        client.budgets().get_costs(request).await.unwrap().into_inner().costs
    };
    until("the report to be recorded", TURN_TIMEOUT, async || {
        let costs = costs().await;
        if costs.is_empty() { Err("nothing is recorded") } else { Ok(()) }
    })
    .await;
    // Those that are there now are there for the second time as well: reports are processed in
    // order.
    let (second, mut other) = (reserve(DOLLAR), report.clone());
    assert_eq!(
        bus.ask(&subject::Budgets, &second, patience).await.unwrap().refusal,
        "",
        "the rest is free again"
    );
    other.call_id = Uuid::now_v7().to_string();
    other.reservation_id = second.reservation_id;
    other.purpose = "chat completions".into();
    bus.publish(&address, &other).await.unwrap();
    until("the other report to be recorded", TURN_TIMEOUT, async || {
        let costs = costs().await;
        if costs.len() == 2 { Ok(()) } else { Err(format!("{costs:?}")) }
    })
    .await;
    for row in costs().await {
        assert_eq!((row.calls, row.usage.unwrap().cost_pico_usd), (1, DOLLAR / 2), "{}", row.key);
    }
    let budgets = client
        .budgets()
        .list_budgets(v1::ListBudgetsRequest::default())
        .await
        .unwrap()
        .into_inner()
        .budgets;
    assert_eq!(budgets.len(), 1);
    let (spec, status) = (budgets[0].spec.clone().unwrap(), budgets[0].status.clone().unwrap());
    assert_eq!((spec.token_id.as_str(), spec.limit_pico_usd), ("token-1", 2 * DOLLAR));
    assert_eq!((status.spent_pico_usd, status.reserved_pico_usd), (DOLLAR, 0));

    // An invalid report is not lost.
    let broken = mesh::SpendingReport {
        call_id: Uuid::now_v7().to_string(),
        model_id: "none".into(),
        ..report
    };
    bus.publish(&address, &broken).await.unwrap();
    let letter = until("the report to be dead-lettered", TURN_TIMEOUT, async || {
        mesh.bus().await.dead_letters(0, 10).await.unwrap().pop().ok_or("there is none")
    })
    .await;
    assert_eq!(mesh::SpendingReport::decode(letter.letter.payload.as_slice()).unwrap(), broken);
    assert!(
        letter.letter.reason.contains("the spending report is invalid") && letter.check().is_ok(),
        "{letter:?}"
    );
}

#[tokio::test]
async fn budget_limits_calls_priced_by_their_vendor() {
    let mesh = Mesh::start().await.unwrap();
    // It reports that a call cost 0.00002 dollars.
    let vendor = VendorServer::answering(|_| Reply::stream(openai::RECORDED_OPENROUTER)).await;
    let provider = v1::ModelProviderSpec {
        name: "router".into(),
        r#type: v1::ModelProviderType::Openrouter.into(),
        base_url: vendor.url(),
        api_key: "sk-or-test".into(),
        ..Default::default()
    };
    mesh.agent("router", provider).await.unwrap();
    let client = mesh.client().unwrap();
    let free = v1::UpdateModelRequest {
        model: "router".into(),
        prices: Some(v1::Prices::default()),
        ..Default::default()
    };
    client.models().update_model(free).await.unwrap();
    let limit_pico_usd = DOLLAR / 50_000;
    let spec = v1::BudgetSpec {
        period: v1::BudgetPeriod::Total.into(),
        limit_pico_usd,
        ..Default::default()
    };
    let whole = budget(&client, spec).await;
    let spec = v1::TaskSpec { agent: "router".into(), title: "Told".into(), ..Default::default() };
    let conversation = client.create_task_with(spec).await.unwrap();
    let task = conversation.ask("Once.").await;
    assert_eq!(task.status.as_ref().unwrap().last_outcome(), v1::TurnOutcome::Completed);
    let seen = budget_status(&client, &whole).await;
    assert_eq!((seen.spent_pico_usd, seen.reserved_pico_usd), (limit_pico_usd, 0));
    let status = conversation.ask("Once more.").await.status.unwrap();
    assert_eq!(status.last_error.map(|error| error.code).as_deref(), Some("BUDGET_EXHAUSTED"));
    assert_eq!(vendor.requests().len(), 1);
}

#[tokio::test]
async fn two_workers_calls_of_one_step_are_each_recorded_once() {
    let running = Mesh::start().await.unwrap();
    let script = json!({"turns": [{"text": "Yes.", "usage": {"input": 1000, "output": 200}}]});
    running.scripted_agent("worker", &script).await.unwrap();
    let client = running.client().unwrap();
    let spec = v1::TaskSpec { agent: "worker".into(), title: "One".into(), ..Default::default() };
    let conversation = client.create_task_with(spec).await.unwrap();
    let bus = running.bus().await;
    let mut results = bus.tap("construct.v1.cmd.task.>").await.unwrap();
    let task = conversation.ask("Is it?").await;
    let each = cost(&task);
    assert!(each > 0);
    let result = loop {
        let message = results.next().await.unwrap();
        let result = mesh::StepResult::decode(message.payload).unwrap_or_default();
        if result.usage.is_some_and(|usage| usage.cost_pico_usd == each) {
            break result;
        }
    };
    let address = subject::TaskResult::new(conversation.id().parse().unwrap());
    let (own, other, none) = (result.call_id.clone(), Uuid::now_v7().to_string(), String::new());
    // A worker that was presumed dead and another one; the result of each may be duplicated.
    // Workers of the previous version distinguish deliveries only.
    for (call_id, delivery, calls) in [
        (&own, 1, 1),
        (&other, 1, 2),
        (&other, 1, 2),
        (&own, 1, 2),
        (&none, 1, 3),
        (&none, 2, 4),
        (&none, 1, 4),
    ] {
        let call_id = call_id.clone();
        bus.publish(&address, &mesh::StepResult { call_id, delivery, ..result.clone() })
            .await
            .unwrap();
        until("the call to be recorded", TURN_TIMEOUT, async || {
            match cost(&conversation.task().await.unwrap()) {
                booked if booked == calls * each => Ok(()),
                booked => Err(booked),
            }
        })
        .await;
    }
}
