//! Budgets, costs, and the source of prices.

use construct_domain::{AgentId, TaskId};
use construct_proto::v1::{self, PricesSource, budget_service_client::BudgetServiceClient};
use tonic::{Code, transport::Channel};
use uuid::Uuid;

use super::harness::*;
use crate::validate::tests::fields;

fn budgets(gateway: &Gateway) -> BudgetServiceClient<Channel> {
    BudgetServiceClient::new(gateway.channel())
}

fn spec() -> v1::BudgetSpec {
    v1::BudgetSpec {
        period: v1::BudgetPeriod::Month.into(),
        limit_pico_usd: 5_000_000_000_000,
        ..Default::default()
    }
}

fn create(spec: v1::BudgetSpec) -> v1::CreateBudgetRequest {
    v1::CreateBudgetRequest { spec: Some(spec), ..Default::default() }
}

#[tokio::test]
async fn budget_can_be_created_updated_and_deleted() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let mut client = budgets(&gateway);
    let mut stream = gateway.subscribe("", "").await;
    let keyed = v1::CreateBudgetRequest { idempotency_key: "k".into(), ..create(spec()) };
    let created = client.create_budget(keyed.clone()).await.expect("it is made").into_inner();
    assert_eq!(client.create_budget(keyed).await.expect("it is repeated").into_inner(), created);
    assert_eq!(next_events(&mut stream, 1).await[0].r#type, "budget.created");
    expect_error(client.create_budget(create(spec())).await, Code::AlreadyExists);

    let agent_budget = v1::BudgetSpec { agent: "ada".into(), ..spec() };
    let agent_budget =
        client.create_budget(create(agent_budget)).await.expect("it is made").into_inner();
    assert_eq!(agent_budget.spec.clone().expect("set").agent, "ada");
    assert!(agent_budget.status.clone().expect("set").agent_id.starts_with("agent_"));
    let task_budget =
        v1::BudgetSpec { task: task.clone(), period: v1::BudgetPeriod::Total.into(), ..spec() };
    client.create_budget(create(task_budget)).await.expect("it is made");

    let filter = v1::list_budgets_request::Filter { task, ..Default::default() };
    let listed = v1::ListBudgetsRequest { filter: Some(filter), ..Default::default() };
    let listed = client.list_budgets(listed).await.expect("listed").into_inner().budgets;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].status.clone().expect("set").since, None, "a total has no start");
    let all = client
        .list_budgets(v1::ListBudgetsRequest::default())
        .await
        .expect("listed")
        .into_inner()
        .budgets;
    assert_eq!(all.len(), 3);

    let budget = id(created.metadata.clone());
    let update = v1::UpdateBudgetRequest {
        budget: budget.clone(),
        limit_pico_usd: 7,
        revision: 1,
        ..Default::default()
    };
    let updated =
        client.update_budget(update.clone()).await.expect("the revision is right").into_inner();
    assert_eq!(updated.spec.expect("set").limit_pico_usd, 7);
    expect_error(client.update_budget(update).await, Code::Aborted);
    let delete = v1::DeleteBudgetRequest { budget: budget.clone(), ..Default::default() };
    client.delete_budget(delete).await.expect("it is deleted");
    expect_error(client.get_budget(v1::GetBudgetRequest { budget }).await, Code::NotFound);
}

#[tokio::test]
async fn invalid_budget_names_each_wrong_field() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = budgets(&gateway);
    let wrong = v1::BudgetSpec {
        agent: "ada".into(),
        task: "no task".into(),
        period: 0,
        limit_pico_usd: -1,
        token_id: "t".into(),
    };
    let status = expect_error(client.create_budget(create(wrong)).await, Code::InvalidArgument);
    let expected =
        ["spec.task", "spec.limit_pico_usd", "spec.period", "spec.task", "spec.token_id"];
    assert_eq!(fields(&status), expected);
    let unknown = v1::BudgetSpec { agent: "unknown".into(), ..spec() };
    expect_error(client.create_budget(create(unknown)).await, Code::NotFound);
    let missing = v1::BudgetSpec { task: TaskId::from_uuid(Uuid::nil()).to_string(), ..spec() };
    expect_error(client.create_budget(create(missing)).await, Code::NotFound);
    let costs = v1::GetCostsRequest { task: "x".into(), group: 99, ..Default::default() };
    assert_eq!(
        fields(&expect_error(client.get_costs(costs).await, Code::InvalidArgument)),
        ["group", "task"]
    );
    let unknown = v1::GetCostsRequest { agent: "unknown".into(), ..Default::default() };
    expect_error(client.get_costs(unknown).await, Code::NotFound);
    let deleted = AgentId::from_uuid(Uuid::nil()).to_string();
    let costs = v1::GetCostsRequest { agent: deleted, ..Default::default() };
    let costs = client.get_costs(costs).await.expect("a deleted agent may have costs").into_inner();
    assert_eq!(costs.total, Some(v1::Cost::default()));
}

#[tokio::test]
async fn prices_and_limits_default_to_the_catalog() {
    let gateway = Gateway::start().await;
    let kinds = [
        ("claude", v1::ModelProviderType::Anthropic),
        ("local", v1::ModelProviderType::Ollama),
        ("script", v1::ModelProviderType::Scripted),
    ];
    for (name, kind) in kinds {
        let spec = v1::ModelProviderSpec {
            name: name.into(),
            r#type: kind.into(),
            api_key: if name == "claude" { "sk-1".into() } else { String::new() },
            ..Default::default()
        };
        let request = v1::CreateModelProviderRequest { spec: Some(spec), ..Default::default() };
        gateway.providers().create_model_provider(request).await.expect("it is made");
    }
    let create =
        async |name: &str, provider: &str, vendor_model: &str, prices: Option<v1::Prices>| {
            let spec = v1::ModelSpec {
                name: name.into(),
                provider: provider.into(),
                vendor_model: vendor_model.into(),
                prices,
                ..Default::default()
            };
            let request = v1::CreateModelRequest { spec: Some(spec), ..Default::default() };
            let model =
                gateway.models().create_model(request).await.expect("it is made").into_inner();
            (model.spec.expect("set"), model.status.expect("set").prices_source())
        };
    let (known, source) = create("opus", "claude", "claude-opus-4-5", None).await;
    assert_eq!(source, PricesSource::Catalog);
    assert_eq!((known.context_window, known.max_output_tokens), (200_000, 64_000));
    let prices = known.prices.expect("set");
    let expected = (5_000_000, 25_000_000, 500_000, 6_250_000);
    assert_eq!((prices.input, prices.output, prices.cache_read, prices.cache_write), expected);
    let given = v1::Prices { input: 7, thinking: 3, request: 2, ..Default::default() };
    let (own, source) = create("own", "claude", "claude-opus-4-5", Some(given)).await;
    assert_eq!((own.prices, source), (Some(given), PricesSource::Given));
    let (unknown, source) = create("new", "claude", "claude-from-the-future", None).await;
    assert_eq!((unknown.context_window, source), (128_000, PricesSource::Unknown));
    assert_eq!(create("llama", "local", "llama3", None).await.1, PricesSource::Free);
    assert_eq!(create("fake", "script", "x", None).await.1, PricesSource::Free);
    let update =
        v1::UpdateModelRequest { model: "new".into(), prices: Some(given), ..Default::default() };
    let updated = gateway.models().update_model(update).await.expect("changed").into_inner();
    assert_eq!(updated.status.expect("set").prices_source(), PricesSource::Given);
    let long = v1::LongContextPrices { above_input_tokens: 0, input: -1, ..Default::default() };
    let wrong = v1::Prices { request: -1, long_context: Some(long), ..Default::default() };
    let update =
        v1::UpdateModelRequest { model: "new".into(), prices: Some(wrong), ..Default::default() };
    let status = expect_error(gateway.models().update_model(update).await, Code::InvalidArgument);
    let expected =
        ["prices.request", "prices.long_context.input", "prices.long_context.above_input_tokens"];
    assert_eq!(fields(&status), expected);

    let request = v1::ListCatalogModelsRequest { r#type: v1::ModelProviderType::Anthropic.into() };
    let models =
        gateway.models().list_catalog_models(request).await.expect("listed").into_inner().models;
    assert!(
        models
            .iter()
            .any(|model| model.vendor_model == "claude-opus-4-5" && !model.source.is_empty())
    );
    assert!(models.iter().all(|model| model.r#type() == v1::ModelProviderType::Anthropic));
}
