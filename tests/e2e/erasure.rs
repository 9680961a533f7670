//! An organization is deleted while it works and while services are killed: it loses access at
//! once, and soon nothing is left of it.

use construct_bus::topology::Stream;
use construct_tests::{
    client::TURN_TIMEOUT,
    mesh::{Mesh, Service},
    wait::until,
};
use serde_json::json;

use crate::identity::{REQUIRED, create_entities, first_key, json_output, output, refusal};

#[tokio::test]
async fn active_organization_is_erased_while_services_crash() {
    let mut mesh = Mesh::start_with(&[REQUIRED]).await.unwrap();
    let operator = String::from_utf8(first_key(&mesh).await.stdout).unwrap().trim().to_owned();
    let mut keys = Vec::new();
    for color in ["red", "blue"] {
        let made = json_output(&mesh, &operator, &["organization", "create", color], "").await;
        let code = made["setupCode"]["code"].as_str().unwrap();
        keys.push(output(&mesh, None, &["key", "exchange"], code).await.trim().to_owned());
        create_entities(&mesh, &keys[keys.len() - 1], color).await;
    }
    let (red, blue) = (keys[0].as_str(), keys[1].as_str());
    let work = ["exec", "--agent", "worker", "Do it."];
    tokio::join!(output(&mesh, Some(red), &work, ""), output(&mesh, Some(blue), &work, ""));
    let organization = json_output(&mesh, red, &["whoami"], "").await["organizationId"]
        .as_str()
        .unwrap()
        .to_owned();
    // A script that runs longer than any test waits.
    let script =
        json!({"turns": [{"code": "execute_command('echo > begun; sleep 600', {timeout_seconds: 590})"}]}).to_string();
    output(
        &mesh,
        Some(red),
        &["modelprovider", "create", "slow", "--type", "scripted", "--script-file", "-"],
        &script,
    )
    .await;
    output(
        &mesh,
        Some(red),
        &["model", "create", "slow", "--provider", "slow", "--model-id", "slow"],
        "",
    )
    .await;
    output(&mesh, Some(red), &["agent", "create", "slow", "--model", "slow"], "").await;
    let task = json_output(&mesh, red, &["task", "create", "--agent", "slow"], "").await;
    let task = task["metadata"]["id"].as_str().unwrap().to_owned();
    output(&mesh, Some(red), &["message", "create", &task, "Do it slowly."], "").await;
    let begun = mesh.home().join("data/workspaces").join(&task).join("begun");
    construct_tests::client::wait_for_file(&begun, |_| true).await;

    let (path, notes) = (mesh.home().join("notes.txt"), "what red has uploaded");
    std::fs::write(&path, notes).unwrap();
    let uploaded = json_output(&mesh, red, &["file", "upload", path.to_str().unwrap()], "").await;
    assert_eq!(uploaded["status"]["state"], "FILE_STATE_READY", "{uploaded}");
    let files = mesh.home().join("data/blobs/files").join(&organization);
    assert!(files.exists());

    let sure = refusal(&mesh, Some(&operator), &["organization", "delete", "red"]).await;
    assert!(sure.contains("--yes"), "{sure}");
    mesh.kill(Service::Reconciler).unwrap();
    output(&mesh, Some(&operator), &["organization", "delete", "red", "--yes"], "").await;
    for arguments in
        [&["whoami"][..], &["task", "list"], &["message", "create", &task, "And this."]]
    {
        refusal(&mesh, Some(red), arguments).await;
    }
    mesh.crash(Service::Gateway).await.unwrap();
    mesh.spawn(Service::Reconciler).unwrap();
    mesh.crash(Service::Gateway).await.unwrap();
    let trail = ["audit", "list", "--method", "EraseOrganization"];
    let erased = until("the trail to say that it is erased", TURN_TIMEOUT, async || {
        let trail = json_output(&mesh, &operator, &trail, "").await;
        if trail.to_string().contains(&organization) { Ok(trail.to_string()) } else { Err(trail) }
    })
    .await;
    for count in ["tasks=2", "messages=", "secrets=1", "agents=2", "step_usage="] {
        assert!(erased.contains(count), "{count}: {erased}");
    }
    let id: construct_domain::OrganizationId = organization.parse().unwrap();
    let id = id.uuid().to_string();
    // The last row about it says that its folder has to be deleted.
    until("nothing of it to be left in the database", TURN_TIMEOUT, async || {
        let contents = mesh.database.contents().await;
        let of_it =
            contents.lines().filter(|row| row.contains(&id) && !row.starts_with("audit_entries: "));
        let left: Vec<String> = of_it.map(str::to_owned).collect();
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    assert!(!files.exists(), "its files are gone with it");
    until("its events to be gone from NATS", TURN_TIMEOUT, async || {
        let events = mesh.nats.stored_messages(Stream::Events).await;
        let left = events.iter().filter(|event| event.subject.contains(&organization)).count();
        if left == 0 { Ok(()) } else { Err(left) }
    })
    .await;
    // The other organization has everything, and works.
    let tasks = json_output(&mesh, blue, &["task", "list"], "").await;
    assert_eq!(tasks["tasks"].as_array().unwrap().len(), 1, "{tasks}");
    assert!(output(&mesh, Some(blue), &work, "").await.contains("blue sees"));
}
