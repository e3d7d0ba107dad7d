//! One client request from its head to the last byte of its response, counted exactly once.

use std::sync::Arc;
use std::time::Duration;

use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::Response;

use warmroute_process::access::keys::KeyId;

use super::explanation::Explanation;
use super::gateway::GatewayLink;
use super::headers;
use super::waiting::HeldPlace;
use crate::admission::PlaceUse;
use crate::call_report::{CallReport, CallSinks};
use crate::error::{ErrorForm, ProxyError};
use crate::metrics::{RequestEnd, RouteLabel};
use crate::tenants::{Settlement, TenantRefusal, TenantVisit};

/// Reported when it is dropped, as [`RequestEnd::ClientGone`] unless another end was set.
pub(super) struct Call {
    pub report: CallReport,
    sinks: Arc<CallSinks>,
    form: ErrorForm,
    /// The client's tenant, if there are tenants.
    tenant: Option<Arc<TenantVisit>>,
    explanation: Explanation,
    /// Present if a gateway sends the request to its engine.
    gateway: Option<GatewayLink>,
    /// The place that it has at a worker.
    pub place: Option<PlaceUse>,
    /// The place that it has while it waits for a worker.
    pub held: Option<HeldPlace>,
}

impl Call {
    pub(super) fn new(route: RouteLabel, head: &Parts, sinks: &Arc<CallSinks>) -> Self {
        let headers = &head.headers;
        let (id, traces) = (headers::request_id(headers), headers::traces(headers));
        let mut report = CallReport::new(route, id, traces);
        let [_, traceparent] = &report.traces;
        report.trace = sinks.tracer.begin(traceparent.as_ref());
        let tenant: Option<Arc<TenantVisit>> = head.extensions.get().cloned();
        report.tenant = tenant.as_ref().map(|tenant| tenant.name().clone());
        Self {
            report,
            sinks: Arc::clone(sinks),
            form: ErrorForm::of_path(head.uri.path()),
            tenant,
            explanation: head.extensions.get().copied().unwrap_or_default(),
            gateway: head.extensions.get().cloned(),
            place: None,
            held: None,
        }
    }

    pub(super) const fn tenant(&self) -> Option<&Arc<TenantVisit>> {
        self.tenant.as_ref()
    }

    pub(super) const fn gateway(&self) -> Option<&GatewayLink> {
        self.gateway.as_ref()
    }

    pub(super) const fn explanation(&self) -> Explanation {
        self.explanation
    }

    pub(super) fn tenant_name(&self) -> Option<&KeyId> {
        self.tenant.as_ref().map(|tenant| tenant.name())
    }

    /// Fails if the model is not for the tenant. The error does not depend on its existence.
    pub(super) fn check_model(&self, model: &str) -> Result<(), ProxyError> {
        let checked = self.tenant.as_ref().map(|tenant| tenant.check_model(model));
        Ok(checked.transpose().map(Option::unwrap_or_default)?)
    }

    /// Charges a prompt to the tenant.
    pub(super) fn admit_prompt(&self, tokens: u32) -> Result<(), ProxyError> {
        let admitted = self
            .tenant
            .as_ref()
            .map(|tenant| tenant.admit_prompt(tokens));
        Ok(admitted.transpose().map(Option::unwrap_or_default)?)
    }

    /// Takes the number of tokens generated so far.
    pub(super) fn generated(&self, tokens: u64) {
        if let Some(tenant) = &self.tenant {
            tenant.generated(tokens);
        }
    }

    /// Ends the accounts of tokens. `counted`: generated tokens by count.
    pub(super) fn settle(&self, settlement: Settlement, counted: u64) {
        if let Some(tenant) = &self.tenant {
            tenant.settle(settlement, counted);
        }
    }

    pub(super) const fn request_id(&self) -> &HeaderValue {
        &self.report.request_id
    }

    /// As decisions are kept.
    pub(super) fn id_and_tenant(&self) -> (&str, Option<&KeyId>) {
        let id = self.request_id().to_str().unwrap_or("-");
        (id, self.tenant_name())
    }

    fn age(&self) -> Duration {
        self.report.started.elapsed()
    }

    pub(super) fn first_byte(&self) {
        let metrics = &self.sinks.metrics;
        metrics.first_byte(self.report.route, self.age());
    }

    /// A client's headers as an engine gets them. The engine's spans are children of this router's.
    pub(super) fn to_engine(&self, headers: HeaderMap) -> HeaderMap {
        let mut headers = headers::to_engine(headers, self.request_id());
        if let Some(trace) = &self.report.trace {
            headers.insert(headers::TRACEPARENT, trace.traceparent());
        }
        headers
    }

    /// The client has the engine's whole answer.
    pub(super) const fn answered(&mut self, end: RequestEnd) {
        self.report.end = end;
    }

    /// The event with which a stream ends that its engine does not go on with.
    pub(super) fn error_event(&self) -> String {
        ProxyError::StreamSilent.event(self.form)
    }

    /// The engine closed the connection before the end of its answer.
    pub(super) const fn broken(&mut self) {
        self.report.end = RequestEnd::Failed;
    }

    /// The router's own error answer.
    pub(super) fn refuse(mut self, error: &ProxyError) -> Response {
        self.report.status = error.status().as_u16();
        let is_limit = matches!(error, ProxyError::Tenant(TenantRefusal::Limit(_)));
        self.report.end = match error.status() {
            _ if is_limit => RequestEnd::Limited,
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => RequestEnd::Shed,
            status if status.is_server_error() => RequestEnd::Failed,
            _ => RequestEnd::Refused,
        };
        // Quoted: it may have text of the client.
        tracing::debug!(request_id = ?self.request_id(), ?error, "request refused");
        self.settle(Settlement::Void, 0);
        if let (Some(tenant), ProxyError::Tenant(TenantRefusal::Model)) = (&self.tenant, error) {
            tenant.refund_request();
        }
        let mut response = error.response(self.form);
        self.sign(response.headers_mut());
        response
    }

    /// The router's own answer.
    pub(super) fn done(mut self, mut response: Response) -> Response {
        self.report.status = response.status().as_u16();
        self.report.end = RequestEnd::Ok;
        self.sign(response.headers_mut());
        response
    }

    /// Adds the ids by which clients follow the request.
    pub(super) fn sign(&self, headers: &mut HeaderMap) {
        headers.insert(headers::REQUEST_ID, self.report.request_id.clone());
        for (name, value) in headers::TRACES.into_iter().zip(&self.report.traces) {
            if let Some(value) = value {
                headers.insert(name, value.clone());
            }
        }
        if let Some(tenant) = &self.tenant {
            tenant.rates().write(headers);
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.sinks.ended(&mut self.report);
    }
}
