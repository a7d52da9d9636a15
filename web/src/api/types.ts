// The names under which pages use the schemas of the gateway's OpenAPI document.
import type { components } from "../../build/schema";

type Schemas = components["schemas"];

export type TaskView = Schemas["TaskView"];
export type TaskPage = Schemas["TaskPage"];
export type TaskStatus = Schemas["TaskStatus"];
export type AttemptView = Schemas["AttemptView"];
export type Explanation = Schemas["Explanation"];
export type JobView = Schemas["JobView"];
export type JobRef = Schemas["JobRef"];
export type Counts = Schemas["Counts"];
export type QueueView = Schemas["QueueView"];
export type PauseView = Schemas["PauseView"];
export type AlertView = Schemas["AlertView"];
export type DagView = Schemas["DagView"];
export type DagSummary = Schemas["DagSummary"];
export type DagVersionView = Schemas["DagVersionView"];
export type DagDeployed = Schemas["DagDeployed"];
export type SourceView = Schemas["SourceView"];
export type BackfillView = Schemas["BackfillView"];
export type BackfillAnswer = Schemas["BackfillAnswer"];
export type DatasetView = Schemas["DatasetView"];
export type DatasetSummary = Schemas["DatasetSummary"];
export type DatasetEventView = Schemas["DatasetEventView"];
export type PartitionView = Schemas["PartitionView"];
export type Lineage = Schemas["Lineage"];
export type BufferView = Schemas["BufferView"];
export type QueryView = Schemas["QueryView"];
export type RouteHealth = Schemas["RouteHealth"];
export type RegistryChange = Schemas["RegistryChange"];
export type ReplayView = Schemas["ReplayView"];
export type KeyView = Schemas["KeyView"];
export type MemberView = Schemas["MemberView"];
export type WorkerTokenView = Schemas["WorkerTokenView"];
export type ExportView = Schemas["ExportView"];
export type ReceiptReply = Schemas["ReceiptReply"];
export type AlertSettingsView = Schemas["AlertSettingsView"];
export type DeadMessage = Schemas["DeadMessage"];
export type Problem = Schemas["Problem"];

export type Session = Schemas["SessionView"];
export type SignInMethods = Schemas["SignInMethods"];
export type SessionEntry = Schemas["SessionEntry"];
export type BulkFilter = Schemas["BulkFilter"];
export type BulkPreview = Schemas["BulkPreview"];
export type BulkView = Schemas["BulkView"];
export type RunFailures = Schemas["RunFailures"];
export type FailureView = Schemas["FailureView"];
export type RunTimeline = Schemas["RunTimeline"];
export type TimelineAttempt = Schemas["TimelineAttempt"];
export type RunDurations = Schemas["RunDurations"];
export type LiveRun = Schemas["LiveRun"];
export type Minute = Schemas["MinuteCounts"];
export type Overview = Schemas["Overview"];

/** The data of an event of the live stream, which an OpenAPI document cannot describe. */
export interface LiveUpdate {
  overview: Overview;
  operations: BulkView[];
}

export type WorkerView = Schemas["WorkerView"];
export type SearchHit = Schemas["SearchHit"];
export type LogPage = Schemas["TaskLog"];
export type RunView = Schemas["RunView"] & { job?: JobRef | null; errors?: { error_class: string; tasks: number }[] };
