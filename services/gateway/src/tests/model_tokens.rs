//! Model tokens: signed, bounded, and only for existing models and tasks.

use construct_domain::OrganizationId;
use construct_proto::v1::{self, model_token_service_client::ModelTokenServiceClient};
use construct_runtime::{MasterKeys, ModelToken};
use jiff::Timestamp;
use tonic::{Code, transport::Channel};

use super::harness::*;
use crate::validate::tests::fields;

fn tokens(gateway: &Gateway) -> ModelTokenServiceClient<Channel> {
    ModelTokenServiceClient::new(gateway.channel())
}

fn request(model: &str) -> v1::CreateModelTokenRequest {
    v1::CreateModelTokenRequest {
        models: vec![model.into()],
        ..v1::CreateModelTokenRequest::default()
    }
}

#[tokio::test]
async fn model_token_names_organization_task_and_budget() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let request = v1::CreateModelTokenRequest {
        task: task.clone(),
        budget_pico_usd: 2_000_000_000_000,
        expires_in: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
        ..request("m")
    };
    let made = tokens(&gateway).create_model_token(request).await.expect("it is made").into_inner();
    let keys = MasterKeys::parse(TOKEN_KEY).expect("a key");
    let now = Timestamp::now();
    let token = ModelToken::verify(&made.token, &keys, now).expect("it is valid");
    assert_eq!(
        (token.id.as_str(), token.models.as_slice()),
        (made.id.as_str(), ["m".to_owned()].as_slice())
    );
    assert_eq!((token.organization, token.task), (OrganizationId::LOCAL.to_string(), task));
    assert_eq!(token.budget_pico_usd, 2_000_000_000_000);
    let left = token.expires_at.duration_since(now).as_secs();
    assert!((50..=60).contains(&left), "{left}");
    assert!(!format!("{made:?}").contains(&made.token));
}

#[tokio::test]
async fn model_token_needs_existing_models_and_bounds() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = tokens(&gateway);
    expect_error(client.create_model_token(request("unknown")).await, Code::NotFound);
    let task = v1::CreateModelTokenRequest {
        task: "task_01890a5d-ac96-774b-bcce-b302099a8057".into(),
        ..request("m")
    };
    expect_error(client.create_model_token(task).await, Code::NotFound);
    let wrong = v1::CreateModelTokenRequest {
        budget_pico_usd: -1,
        expires_in: Some(prost_types::Duration { seconds: 8 * 24 * 3600, nanos: 0 }),
        ..v1::CreateModelTokenRequest::default()
    };
    let status = expect_error(client.create_model_token(wrong).await, Code::InvalidArgument);
    assert_eq!(fields(&status), ["budget_pico_usd", "expires_in", "models"]);
}
