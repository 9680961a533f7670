//! Isolation between organizations: neither visibility nor waiting.

use construct_tests::http;
use tonic::Request;

use super::*;

/// An organization other than the operator's, with a scripted model of this name.
async fn other_organization(mesh: &Mesh, model: &str, script: &Value) -> String {
    let channel = mesh.channel().unwrap();
    let spec = v1::OrganizationSpec {
        name: "Elsewhere".into(),
        slug: "elsewhere".into(),
        ..Default::default()
    };
    let request = v1::CreateOrganizationRequest { spec: Some(spec), ..Default::default() };
    let made = v1::organization_service_client::OrganizationServiceClient::new(channel.clone());
    let made = made.clone().create_organization(request).await.unwrap().into_inner().organization;
    let organization = id(made.unwrap().metadata.as_ref());
    let spec = v1::ModelProviderSpec {
        name: model.to_owned(),
        r#type: v1::ModelProviderType::Scripted.into(),
        script: script.to_string(),
        ..Default::default()
    };
    let request = v1::CreateModelProviderRequest { spec: Some(spec), ..Default::default() };
    mesh.client()
        .unwrap()
        .providers()
        .create_model_provider(request_in(&organization, request))
        .await
        .unwrap();
    let spec =
        v1::ModelSpec { name: model.to_owned(), provider: model.to_owned(), ..Default::default() };
    let request = v1::CreateModelRequest { spec: Some(spec), ..Default::default() };
    mesh.client().unwrap().models().create_model(request_in(&organization, request)).await.unwrap();
    organization
}

/// A request in an organization.
fn request_in<T>(organization: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("x-organization-id", organization.parse().unwrap());
    request
}

#[tokio::test]
async fn slow_scans_do_not_delay_other_organizations() {
    let (mesh, github) = begin_with(&[("CONSTRUCT_SCANNER_CONCURRENCY", "1")]).await;
    commit(&github, "octo/ledger", "");
    // It does not answer during the test.
    mesh.scripted_agent("slow", &json!([{"delay_ms": 900_000, "text": "late"}])).await.unwrap();
    let mut slow = Vec::new();
    for _ in 0..3 {
        slow.push(create(&mesh, scan_spec("octo/ledger", "slow")).await);
    }
    for scan in &slow {
        wait_for_phase(&mesh, scan, Exploring).await;
    }
    let organization =
        other_organization(&mesh, "m", &json!([{"text": answer(&[valid_candidate()])}])).await;
    let scans = mesh.client().unwrap().scans();
    let request =
        v1::CreateScanRequest { spec: Some(scan_spec("octo/ledger", "m")), ..Default::default() };
    let made =
        scans.clone().create_scan(request_in(&organization, request)).await.unwrap().into_inner();
    let scan = id(made.metadata.as_ref());
    let status = until("the other organization's scan to get through", SCAN_TIMEOUT, async || {
        let request = v1::GetScanRequest { scan: scan.clone() };
        let status = scans
            .clone()
            .get_scan(request_in(&organization, request))
            .await
            .unwrap()
            .into_inner()
            .status
            .unwrap();
        if status.phase() == Review { Ok(status) } else { Err(format!("{status:?}")) }
    })
    .await;
    assert_eq!(status.candidates, 1, "{status:?}");
    for scan in &slow {
        let status = get(&mesh, scan).await.status.unwrap();
        assert_eq!(status.phase(), Exploring, "{status:?}");
        // A check without news is no change.
        assert!(status.event_sequence < 10, "{status:?}");
    }
    // Each still reacts to its cancel.
    let request = v1::CancelScanRequest {
        scan: slow[2].clone(),
        reason: "enough".into(),
        ..Default::default()
    };
    scans.clone().cancel_scan(request).await.unwrap();
    assert_eq!(wait_for_phase(&mesh, &slow[2], v1::ScanPhase::Cancelled).await.reason, "enough");
}

#[tokio::test]
async fn scan_is_invisible_to_another_organization() {
    let (mesh, github) = begin().await;
    commit(&github, "octo/ledger", "");
    mesh.scripted_agent("m", &json!([{"text": answer(&[valid_candidate()])}])).await.unwrap();
    mesh.scripted_agent("slow", &json!([{"delay_ms": 900_000, "text": "late"}])).await.unwrap();
    let done = create(&mesh, scan_spec("octo/ledger", "m")).await;
    let open = create(&mesh, scan_spec("octo/ledger", "slow")).await;
    wait_for_phase(&mesh, &done, Review).await;
    wait_for_phase(&mesh, &open, Exploring).await;
    let candidate = id(candidates(&mesh, &done).await[0].metadata.as_ref());
    let organization = other_organization(&mesh, "m", &json!([])).await;

    let client = mesh.client().unwrap();
    for scan in [&done, &open] {
        let scan = || scan.clone();
        let mut codes = Vec::new();
        let mut note = |what: &'static str, refused: Option<tonic::Status>| {
            codes.push((what, refused.map(|status| status.code())));
        };
        let request = request_in(&organization, v1::GetScanRequest { scan: scan() });
        note("get", client.scans().get_scan(request).await.err());
        let request =
            request_in(&organization, v1::CancelScanRequest { scan: scan(), ..Default::default() });
        note("cancel", client.scans().cancel_scan(request).await.err());
        let request =
            request_in(&organization, v1::WatchScanRequest { scan: scan(), ..Default::default() });
        let watched = match client.scans().watch_scan(request).await {
            Ok(stream) => stream.into_inner().message().await.err(),
            Err(status) => Some(status),
        };
        note("watch", watched);
        let request = request_in(
            &organization,
            v1::ListCandidatesRequest { scan: scan(), ..Default::default() },
        );
        note("candidates", client.scans().list_candidates(request).await.err());
        let request = request_in(
            &organization,
            v1::CreateToolsRequest { scan: scan(), ..Default::default() },
        );
        note("tools", client.scans().create_tools(request).await.err());
        let request =
            request_in(&organization, v1::CompareScansRequest { before: scan(), after: scan() });
        note("compare", client.scans().compare_scans(request).await.err());
        let review = v1::ReviewCandidateRequest {
            candidate: candidate.clone(),
            state: v1::CandidateState::Rejected.into(),
            ..Default::default()
        };
        note(
            "review",
            client.scans().review_candidate(request_in(&organization, review)).await.err(),
        );
        let task = get(&mesh, &scan()).await.status.unwrap().task_id;
        let request = request_in(&organization, v1::GetTaskRequest { task });
        note("its task", client.tasks().get_task(request).await.err());
        assert!(codes.iter().all(|(_, code)| *code == Some(Code::NotFound)), "{codes:?}");

        let http = http::client().build().unwrap();
        for (verb, path) in [
            (reqwest::Method::GET, format!("/v1/scans/{}", scan())),
            (reqwest::Method::POST, format!("/v1/scans/{}/cancel", scan())),
            (reqwest::Method::GET, format!("/v1/scans/{}/events", scan())),
            (reqwest::Method::GET, format!("/v1/scans/{}/candidates", scan())),
            (reqwest::Method::POST, format!("/v1/scans/{}/tools", scan())),
            (reqwest::Method::GET, format!("/v1/scans/{}/changes?before={}", scan(), scan())),
        ] {
            let asked = http.request(verb.clone(), format!("{}{path}", mesh.gateway_url()));
            let asked = asked
                .header("x-organization-id", &organization)
                .header("content-type", "application/json");
            let asked = if verb == reqwest::Method::POST { asked.body("{}") } else { asked };
            let answer = asked.send().await.unwrap();
            let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
            assert!(status == 404 && !text.contains("octo"), "{path}: {status} {text}");
        }
    }
    let request = request_in(&organization, v1::ListScansRequest::default());
    assert_eq!(client.scans().list_scans(request).await.unwrap().into_inner().scans, []);
    let status = get(&mesh, &open).await.status.unwrap();
    assert!(status.phase() == Exploring && !status.cancel_requested, "{status:?}");
    let proposed = candidates(&mesh, &done).await;
    assert_eq!(proposed[0].state(), v1::CandidateState::Proposed, "{proposed:?}");
}
