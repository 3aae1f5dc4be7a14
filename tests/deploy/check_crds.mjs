// Holds objects (a JSON list on standard input) against models generated from the sources of the projects that define them.
import { readFileSync } from "node:fs";
import { AnalysisTemplate, Rollout } from "@kubernetes-models/argo-rollouts/argoproj.io/v1alpha1";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1";
import { ServiceMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";

const models = { AnalysisTemplate, Rollout, ScaledObject, ServiceMonitor };
let faults = 0;
let checked = 0;
for (const object of JSON.parse(readFileSync(0, "utf-8"))) {
  const model = models[object.kind];
  if (model === undefined) continue;
  try {
    new model(object).validate();
    checked += 1;
  } catch (error) {
    faults += 1;
    console.error(`${object.kind} ${object.metadata.name}: ${error.message}`);
  }
}
console.log(`${checked} custom resources fit, ${faults} do not`);
process.exit(faults === 0 && checked > 0 ? 0 : 1);
