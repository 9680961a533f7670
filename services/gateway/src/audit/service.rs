//! `AuditService`: reads the audit log.

use std::sync::Arc;

use construct_proto::v1::{
    self, ExportAuditEntriesRequest, ListAuditEntriesRequest, ListAuditEntriesResponse,
    audit_service_server::AuditService,
};
use construct_runtime::clock;
use construct_store::{AuditEntry, Cursor, Key, Order, Page};
use futures::stream::{self, BoxStream, StreamExt as _};
use tonic::{Code, Request, Response, Status};

use crate::{api::Api, convert, metrics, status, validate::requests};

/// Number of entries of one query of an export.
const PAGE_LIMIT: u32 = 500;

fn to_proto(entry: &AuditEntry) -> v1::AuditEntry {
    v1::AuditEntry {
        id: entry.id.to_string(),
        time: Some(convert::time(entry.created_at)),
        method: entry.method.clone(),
        outcome: metrics::code_name(Code::from(i32::from(entry.code))).to_owned(),
        user: entry.user.map(|user| user.to_string()).unwrap_or_default(),
        api_key: entry.api_key.map(|key| key.to_string()).unwrap_or_default(),
        protocol: entry.protocol.clone(),
        peer: entry.peer.clone(),
        user_agent: entry.user_agent.clone(),
        objects: entry.objects.clone(),
        request_id: entry.request_id.clone(),
        trace_id: entry.trace_id.clone(),
        count: i64::try_from(entry.count).unwrap_or(i64::MAX),
    }
}

#[tonic::async_trait]
impl AuditService for Api {
    type ExportAuditEntriesStream = BoxStream<'static, Result<v1::AuditEntry, Status>>;

    async fn list_audit_entries(
        &self,
        request: Request<ListAuditEntriesRequest>,
    ) -> Result<Response<ListAuditEntriesResponse>, Status> {
        let (context, request) = self.begin_unchecked_request(request)?;
        let (page, filter) = requests::list_audit_entries(context.organization(), &request)?;
        let found =
            context.store().audit_list(context.organization(), &filter, &page.query()).await;
        let found = found.map_err(status::from_store)?;
        let (audit_entries, info) = page.cut(&found, to_proto, |entry| entry.cursor(page.key()));
        Ok(Response::new(ListAuditEntriesResponse { audit_entries, page: Some(info) }))
    }

    async fn export_audit_entries(
        &self,
        request: Request<ExportAuditEntriesRequest>,
    ) -> Result<Response<Self::ExportAuditEntriesStream>, Status> {
        let (context, request) = self.begin_unchecked_request(request)?;
        let mut filter = requests::export_audit_entries(&request)?;
        // An export may take long, like a subscription, so it counts as one.
        let permit = self.acquire_subscription_permit(context.organization())?;
        let (backend, organization) = (Arc::clone(&context.backend), context.organization());
        // The entry of this call is written before the response, and is not part of the export.
        let now = context.audit().map_or_else(clock::now, |audit| audit.entry.created_at);
        filter.until = Some(filter.until.map_or(now, |until| until.min(now)));
        let pages = stream::try_unfold(Some(None::<Cursor>), move |after| {
            let (backend, filter) = (Arc::clone(&backend), filter.clone());
            async move {
                let Some(after) = after else { return Ok(None) };
                let order = Order { key: Key::CreatedAt, descending: false };
                let page = Page { limit: PAGE_LIMIT, order, after };
                let found = backend
                    .store
                    .audit_list(organization, &filter, &page)
                    .await
                    .map_err(status::from_store)?;
                let last = found.last().filter(|_| found.len() == PAGE_LIMIT as usize);
                let next = last.map(|last| Some(last.cursor(Key::CreatedAt)));
                Ok::<_, Status>(Some((found, next)))
            }
        });
        let entries = pages.flat_map(move |page| {
            // Held until the stream is dropped.
            let _permit = &permit;
            match page {
                Ok(entries) => stream::iter(entries).map(|entry| Ok(to_proto(&entry))).boxed(),
                Err(status) => stream::once(async { Err(status) }).boxed(),
            }
        });
        Ok(Response::new(entries.boxed()))
    }
}
